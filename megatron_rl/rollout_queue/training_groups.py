"""Opens groups for training and evaluations, and keeps their state for a checkpoint.

Used by the rollout queue.
"""

import logging
from collections.abc import Sequence

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.errors import InputError
from megatron_rl.config.staging import name_of
from megatron_rl.config.tree import Config, QueueConfig
from megatron_rl.data.prompts import PromptSets, PromptStream
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.queue_state import QueueState, UnfinishedGroup
from megatron_rl.protocol.types import Prompt, RankBatch, Sampling
from megatron_rl.rollout_queue import admission
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.curriculum import Curriculum, Visit
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.groups import Group, GroupBook
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.schedule import Schedule, length_rule

log = logging.getLogger(__name__)


class TrainingGroups:
    """Opens training groups: first groups that a resumed run generates again, then new ones."""

    def __init__(self, prompts: PromptSets, config: Config) -> None:
        self.config = config
        self.book = GroupBook()
        self._prompts = prompts
        self.schedule = Schedule(config)
        self._stream = PromptStream(prompts, config.run.seed)
        self._advantage_functions = find_advantage_functions(config.algorithm)
        self._again: list[UnfinishedGroup] = []
        """Groups that a resumed run generates again."""
        self._prompts_again: dict[str, Prompt] = {}
        self._dropped: list[tuple[int, Visit]] = []
        """(number, verdicts) of dropped groups that the curriculum counts with the next batch."""
        self._curriculum = None
        if config.curriculum.is_on:
            self._curriculum = Curriculum(config.curriculum, prompts)

    def open(self, number: int, version: int, stage: int = 0) -> Group:
        """The next group of a stage, opened at the synced `version`.

        number: for a new group. With queue.strict_staleness no token of the group is older than the
        version; otherwise a generator may lag (`admission.py` says how far).
        """
        config = self.schedule.stages[stage]
        again = self._pop_again(stage)
        if again is not None:
            number, draw = again.number, again.draw
            prompt = self._prompts_again[again.prompt_id]
        else:
            draw = self._stream.draws
            prompt = self._draw(self._prompts.weights_of(config))
        return Group(
            number,
            prompt,
            Sampling(
                config.sampling.max_new_tokens,
                config.sampling.temperature,
                config.sampling.top_p,
                config.sampling.top_k,
                config.sampling.min_p,
                tuple(config.sampling.stop),
                # Below 2**31, different for neighbouring runs and groups. Not by the number, which
                # depends on when evaluations open their groups.
                seed=(config.run.seed * 1_000_003 + draw * 9_973) % 2**31,
            ),
            config.train.group_size,
            version,
            stage=stage,
            draw=draw,
            draws_by=f"{config.run.seed}/{draw}" if config.generator.deterministic else "",
            length_rule=length_rule(config),
            needs_classes=self._advantage_functions.needs_classes,
            zero_variance_on=self._advantage_functions.zero_variance_on,
        )

    def _draw(self, weights: Sequence[float]) -> Prompt:
        if self._curriculum is not None:
            self._curriculum.make_room(weights)
        return self._stream.next(weights, self._curriculum)

    def _pop_again(self, stage: int) -> UnfinishedGroup | None:
        """The next group that a stage generates again.

        A group of an earlier stage whose batches are all built counts too: otherwise its prompt
        would be lost.
        """
        for place, again in enumerate(self._again):
            if again.stage <= stage:
                return self._again.pop(place)
        return None

    def due_stage(self, next_step: int, synced: int) -> int | None:
        """The stage that needs one more group within the staleness bound; None if none does.

        The stage of the next batch comes first, then the following stage, once its first batch is
        within the staleness bound.
        """
        for stage in self.schedule.open_stages(next_step):
            config = self.schedule.stages[stage]
            first = self.schedule.first_step(stage)
            assert first is not None
            if admission.may_open_group(
                self.book.untrained_of(stage),
                # Batches before the first one of the stage have no room for the group.
                max_staleness=config.queue.max_staleness - max(0, first - synced),
                prompts_per_batch=config.sampled_groups,
            ) and admission.is_group_needed(
                self.book.untaken_of(stage),
                next_step=max(next_step, first),
                steps=self.schedule.end_step(stage),
                prompts_per_batch=config.sampled_groups,
            ):
                return stage
        return None

    def lowest_staleness(self, next_step: int) -> int:
        """Minimum of queue.max_staleness over the open stages."""
        stages = self.schedule.open_stages(next_step)
        return min(self.schedule.stages[stage].queue.max_staleness for stage in stages)

    def choose_batch(self, step: int) -> list[int] | None:
        """Numbers of the groups of batch `step`; None to wait."""
        config = self.schedule.at(step)
        return admission.choose_batch(
            self.book.candidates(self.schedule.stage_at(step)),
            step=step,
            prompts_per_batch=config.sampled_groups,
            max_staleness=config.queue.max_staleness,
            is_strict=config.queue.strict_staleness,
        )

    def note_dropped(self, group: Group) -> None:
        """Count a dropped group in the curriculum, which may draw other prompts at once.

        With expert.generator.deterministic it counts with the next batch: draws must not depend on
        which group ended first.
        """
        if self._curriculum is None:
            return
        if self.config.generator.deterministic:
            self._dropped.append((group.number, _visit_of(group)))
        else:
            self._curriculum.note([_visit_of(group)])

    def note_trained(self, groups: Sequence[Group]) -> None:
        """Count the groups of a batch in the curriculum, and commit."""
        if self._curriculum is not None:
            self._curriculum.note(visit for _, visit in sorted(self._dropped))
            self._dropped.clear()
            self._curriculum.note(map(_visit_of, groups))
            self._curriculum.commit()

    def metrics(self, step: int) -> list[Metric]:
        """Metrics of the stage and the curriculum for a batch."""
        of_curriculum = self._curriculum.metrics() if self._curriculum is not None else []
        return [*self.schedule.metrics(step), *of_curriculum]

    def note_batch(self, batch: RankBatch) -> None:
        """Note a built batch, which may end a stage with a plateau."""
        self.schedule.note_batch(batch, self.book.untaken_of(self.schedule.stage_at(batch.step)))

    def state(self, step: int, *, groups_opened: int) -> QueueState:
        """The state, without evaluations, when no batch after `step` batches is built."""
        return QueueState(
            step=step,
            cursor=self._stream.state(),
            groups_opened=groups_opened,
            unfinished=sorted(self.book.unfinished() + self._again, key=lambda one: one.number),
            evaluated=[],
            stages=self.schedule.state(),
            curriculum=self._curriculum.state() if self._curriculum is not None else None,
        )

    def restore(self, state: QueueState) -> None:
        """Restore the state. Raises InputError when the run has other prompts."""
        self._stream.restore(state.cursor)
        self.schedule.restore(state.stages, state.step)
        if self._curriculum is not None and state.curriculum is not None:
            self._curriculum.restore(state.curriculum)
        by_id = {prompt.id: prompt for prompts in self._prompts.train for prompt in prompts}
        for group in state.unfinished:
            if group.prompt_id not in by_id:
                raise InputError(
                    f"the saved state of the queue names the prompt {group.prompt_id!r}, which the "
                    "prompt sources lack: resume with the prompts of the saved run"
                )
            self._prompts_again[group.prompt_id] = by_id[group.prompt_id]
        self._again += state.unfinished
        log.info(
            "resumed after step %d: %d groups are generated again", state.step, len(self._again)
        )


def check_draws(prompts: PromptSets, config: Config) -> None:
    """Raise InputError for a stage without a prompt to draw."""
    for stage in range(len(config.stages) + 1):
        try:
            TrainingGroups(prompts, config).open(0, version=0, stage=stage)
        except InputError as error:
            where = f"{name_of(config, stage)}: " if config.stages else ""
            raise InputError(f"{where}{error}") from error


def _visit_of(group: Group) -> Visit:
    right = sum(scored.score.is_correct for scored in group.scored.values())
    return Visit(group.prompt.id, right, graded=len(group.scored), size=group.size)


class GroupOpener:
    """Opens groups and numbers them."""

    def __init__(
        self,
        config: QueueConfig,
        leases: Leases,
        *,
        evaluations: EvaluationScheduler,
        training: TrainingGroups,
    ) -> None:
        self._config = config
        self._leases = leases
        self._evaluations = evaluations
        self._training = training
        self.count = evaluations.first_number
        """Number of opened groups, and of the next new group."""

    def rules(self, synced: int, next_step: int | None) -> LeaseRules:
        """The lease rules at a synced version."""
        staleness = self._config.max_staleness
        if next_step is not None:
            staleness = self._training.lowest_staleness(next_step)
        evaluators = self._evaluations.evaluators
        return LeaseRules(
            synced,
            staleness,
            self._config.strict_staleness,
            evaluators.names,
            evaluators.version,
        )

    def open(self, rules: LeaseRules, next_step: int | None) -> Group | None:
        """A new group, if one is needed and a generator has room for a completion.

        Evaluation groups come first. next_step: the first step that could train on a new group;
        None when training is over.
        """
        running = self._evaluations.running
        if (
            running is not None
            and running.has_unopened
            and self._leases.can_take(rules, is_evaluation=True)
        ):
            group = running.open_group(self.count)
        elif (
            next_step is not None
            and not self._evaluations.excludes_training
            and (stage := self._training.due_stage(next_step, rules.synced)) is not None
            and self._leases.can_take(rules, is_evaluation=False)
        ):
            group = self._training.open(self.count, rules.synced, stage)
            self._training.book.open(group)
        else:
            return None
        # A group that is generated again keeps its number, which is below the count.
        self.count = max(self.count, group.number + 1)
        return group
