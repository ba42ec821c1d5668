"""Replay: train on recorded groups of other runs, or on earlier groups of this run.

Used by the rollout queue. The draw of a step depends only on the seed, the step and the recorded
groups, so a resumed run draws the same. Token ids and logprobs are read when a batch is dealt.
"""

import collections
import dataclasses
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.epochs import ShuffledEpochs
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.prompt import normalized
from megatron_rl.protocol.rollout_files import (
    FOLDER,
    WORDS,
    RolloutFile,
    RolloutRecord,
    TokensThinned,
    missing_words,
    read_arrays,
    read_records,
    rollout_files,
    without_texts,
)
from megatron_rl.protocol.types import Prompt, Rollout, Sampling, Score, ScoredRollout, VersionSpan
from megatron_rl.rollout_queue.drop_reasons import GROUP_REASONS, ZERO_VARIANCE
from megatron_rl.rollout_queue.groups import (
    NO_VERSION,
    Group,
    has_equal_returns,
    returns_of_replies,
)
from megatron_rl.rollout_queue.replay_datasets import folder_of_datasets

log = logging.getLogger(__name__)

# Reasons to leave a recorded group out.
TOO_LONG = "too_long"
"""A sequence is longer than the context."""
HELD_OUT = "held_out"
"""An evaluation has its question."""
THINNED = "tokens_thinned"
"""queue.keep_tokens_of_steps removed its token ids."""
UNSCORED = "unscored"
"""A completion has no reward."""


class StoredGroup(NamedTuple):
    """A recorded group, without its arrays."""

    lines: Path
    """The file of lines; the file of words has the same name."""
    question: str
    """Normalized."""
    members: tuple[RolloutRecord, ...]
    """Without their texts."""

    @property
    def rewards(self) -> list[float]:
        return [record.reward or 0.0 for record in self.members]

    def load(self, *, keeps_versions: bool) -> Group:
        """The group with its arrays. Raises InputError if the file of words was cut.

        keeps_versions: for groups of this run; versions of another run are meaningless here.
        """
        first = self.members[0]
        spans = [span for record in self.members for span in record.spans]
        opened = min(span.version for span in spans) if keeps_versions else NO_VERSION
        group = Group(
            first.group,
            Prompt(first.prompt_id, first.task, [], ""),
            Sampling(max(record.tokens for record in self.members), 1.0, seed=first.seed),
            len(self.members),
            opened,
        )
        for index, (record, reward) in enumerate(zip(self.members, self.rewards, strict=True)):
            rollout = self._rollout(record, index, keeps_versions=keeps_versions)
            score = Score(reward, record.parts, record.reason, is_outcome=record.is_outcome)
            group.add(ScoredRollout(rollout, score), now=0.0)
        return group

    def _rollout(self, record: RolloutRecord, index: int, *, keeps_versions: bool) -> Rollout:
        prompt_ids, token_ids, logprobs = read_arrays(record, self.lines)
        spans = [VersionSpan(*span) for span in record.spans]
        if not keeps_versions:
            spans = [msgspec.structs.replace(span, version=NO_VERSION) for span in spans]
        return Rollout(
            lease_id=0,
            index=index,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=spans,
            finish_reason=record.finish_reason,
            row_starts=record.row_starts,
            turn_returns=record.turn_returns,
            conversation=record.conversation,
            text="",
            to_grade=None if record.to_grade is None else "",
        )


@dataclasses.dataclass
class StoredGroups:
    """The recorded groups that can be drawn, and counts of the others by reason."""

    groups: list[StoredGroup] = dataclasses.field(default_factory=list)
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)

    def add_run(
        self,
        run_dir: Path,
        *,
        context_tokens: int,
        drops_zero_variance: bool,
        held_out: frozenset[str],
    ) -> None:
        """Index the training groups of a run.

        held_out: normalized questions that are not trained on. Raises InputError if there are no
        rollouts or their words are missing.
        """
        files = [file for file in rollout_files(run_dir) if file.step is not None]
        if not files:
            raise InputError(f"{run_dir} holds no rollouts of training steps to replay")
        # By number: reasons of groups, "" to draw it, and of completions that were dropped alone.
        reasons: dict[int, str] = {}
        alone: dict[int, str] = {}
        for file in files:
            try:
                groups = list(read_groups(file))
            except TokensThinned:
                records = list(read_records(file.path))
                alone |= {one.group: one.dropped for one in records if _is_dropped_alone(one)}
                reasons |= {one.group: THINNED for one in records if not _is_dropped_alone(one)}
                continue
            for group in groups:
                reason = _reason_to_leave_out(
                    group, context_tokens, drops_zero_variance=drops_zero_variance
                )
                if group.question in held_out:
                    reason = HELD_OUT
                first = group.members[0]
                (alone if _is_dropped_alone(first) else reasons)[first.group] = reason
                if not reason:
                    self.groups.append(group)
        # The rest of a completion's group is usually in another file.
        self.left_out.update(filter(None, (alone | reasons).values()))


def read_groups(file: RolloutFile) -> Iterator[StoredGroup]:
    """The groups of one file, without completions that were dropped alone, unless all were.

    Raises InputError if words are missing.
    """
    members: defaultdict[int, list[RolloutRecord]] = defaultdict(list)
    questions: dict[int, str] = {}
    has_words = file.path.with_suffix(WORDS).exists()
    for line, record in enumerate(read_records(file.path), 1):
        # Without tokens, nothing was left of it, as after a failure of its environment.
        if record.words is None and record.tokens:
            raise InputError(
                f"{file.path}:{line} has no token ids: it was recorded with "
                "queue.record_tokens = false, and cannot be replayed"
            )
        if record.tokens and not has_words:
            raise missing_words(file.path, f"{file.path}:{line}")
        members[record.group].append(without_texts(record))
        questions[record.group] = normalized(record.problem)
    for number, records in members.items():
        kept = [record for record in records if not _is_dropped_alone(record)]
        yield StoredGroup(file.path, questions[number], tuple(kept or records))


def _is_dropped_alone(record: RolloutRecord) -> bool:
    """Whether a completion was dropped without its group."""
    is_ungraded = record.reward is None
    return bool(record.dropped) and (is_ungraded or record.dropped not in GROUP_REASONS)


def _reason_to_leave_out(
    group: StoredGroup, context_tokens: int, *, drops_zero_variance: bool
) -> str:
    dropped = group.members[0].dropped
    if dropped not in ("", ZERO_VARIANCE):
        return dropped
    rewards = [record.reward for record in group.members if record.reward is not None]
    if len(rewards) < len(group.members):
        return UNSCORED
    if any(record.prompt_tokens + record.tokens > context_tokens for record in group.members):
        return TOO_LONG
    has_zero_variance = has_equal_returns(rewards, returns_of_replies(group.members, rewards))
    return ZERO_VARIANCE if drops_zero_variance and has_zero_variance else ""


class Drawn(NamedTuple):
    """The groups that a step replays."""

    groups: tuple[Group | StoredGroup, ...] = ()
    of_source: tuple[Metric, ...] = ()
    """Metrics of the source of the groups."""

    def load(self) -> list[Group]:
        """The groups with their arrays, read from files. Raises InputError if a file was cut."""
        return [
            group.load(keeps_versions=False) if isinstance(group, StoredGroup) else group
            for group in self.groups
        ]

    def metrics(self, step: int) -> list[Metric]:
        """queue/replayed_*; only groups of this run have an age."""
        if not self.groups:
            return list(self.of_source)
        rewards = [reward for group in self.groups for reward in group.rewards]
        count = len(rewards)
        own = [group for group in self.groups if isinstance(group, Group)]
        oldest = [scored.rollout.oldest_version for group in own for scored in group.ordered]
        ages = [step - version for version in oldest if version != NO_VERSION]
        return [
            *self.of_source,
            Metric("queue/replayed_groups", len(self.groups), "sum", len(self.groups)),
            Metric("queue/replayed_rollouts", count, "sum", count),
            Metric("queue/replayed_reward", sum(rewards), "mean", count),
            Metric("queue/replayed_age_versions_mean", sum(ages), "mean", len(ages)),
            *([Metric("queue/replayed_age_versions_max", max(ages), "max")] if ages else []),
        ]


NOTHING = Drawn()

LEFT_OUT = "queue/replay_left_out_"
"""Prefix of metrics that count recorded groups that are never drawn, by reason."""


class StoredReplay:
    """Draws recorded groups in epochs, in an order fixed by the seed."""

    def __init__(self, stored: StoredGroups, count: int, seed: int) -> None:
        """count: groups per batch. Raises InputError if there is no group to draw."""
        if not stored.groups:
            raise InputError(
                "replay.runs and replay.datasets hold no group to train on; left out were "
                f"{dict(stored.left_out)} groups (zero_variance: equal rewards, which "
                "algorithm.zero_variance_groups='keep' trains on; tokens_thinned: removed by "
                "queue.keep_tokens_of_steps of their run)"
            )
        self._groups, self._count = stored.groups, count
        self._epochs = ShuffledEpochs(len(stored.groups), f"{seed}/replay")
        left_out = [Metric(f"{LEFT_OUT}{name}", n, "max") for name, n in stored.left_out.items()]
        self._metrics = (Metric("queue/replay_groups", len(self._groups), "max"), *left_out)

    def draw(self, step: int, sampled: list[Group]) -> Drawn:
        """The next groups, without arrays: the queue's loop must not wait for files."""
        places = range(step * self._count, (step + 1) * self._count)
        return Drawn(tuple(self._groups[self._epochs.at(place)] for place in places), self._metrics)

    def resume_at(self, step: int) -> None:
        """Do nothing: the draw depends on the step alone."""


class BufferReplay:
    """Draws from the latest groups of this run at random, without replacement within a step."""

    def __init__(self, config: Config, count: int) -> None:
        """count: maximum groups per batch."""
        self._count, self._seed = count, config.run.seed
        self._max_age = config.replay.max_age
        self._run_dir = config.run.dir
        self._groups: collections.deque[Group]
        self._groups = collections.deque(maxlen=config.replay.buffer_groups)

    def draw(self, step: int, sampled: list[Group]) -> Drawn:
        """Draw groups up to replay.max_age old, then add the sampled groups to the buffer."""
        young = [group for group in self._groups if step - oldest_version(group) <= self._max_age]
        chance = random.Random(f"{self._seed}/replay/{step}")
        drawn = chance.sample(young, min(self._count, len(young)))
        metric = Metric("queue/replay_groups", len(self._groups), "max")
        self._groups.extend(sampled)
        return Drawn(tuple(drawn), (metric,))

    def resume_at(self, step: int) -> None:
        """Fill the buffer from the records of earlier steps, if the run has some.

        One that begins at the checkpoint of another run has none. Raises InputError.
        """
        if not (self._run_dir / FOLDER).exists():
            log.warning("the replay buffer begins empty: %s has no rollouts", self._run_dir)
            return
        found: list[StoredGroup] = []
        files = [f for f in rollout_files(self._run_dir) if f.step is not None and f.step < step]
        for file in reversed([file for file in files if not file.is_dropped]):
            try:
                found = [*read_groups(file), *found]
            except TokensThinned as error:
                log.warning("the replay buffer is not filled further: %s", error)
                break
            if len(found) >= (self._groups.maxlen or 0):
                break
        self._groups.extend(group.load(keeps_versions=True) for group in found)
        log.info("%d groups are kept to be replayed", len(self._groups))


def oldest_version(group: Group) -> int:
    return min(scored.rollout.oldest_version for scored in group.scored.values())


def open_replay(config: Config, held_out: Sequence[Prompt]) -> "StoredReplay | BufferReplay | None":
    """The replay source of the configuration, if any. Raises InputError for unusable files."""
    count = config.replay.groups_of(config.train.prompts_per_batch)
    if not count:
        return None
    if config.replay.buffer_groups:
        return BufferReplay(config, count)
    stored = StoredGroups()
    questions = frozenset(normalized(prompt.question) for prompt in held_out)
    for folder in _folders(config):
        stored.add_run(
            folder,
            context_tokens=config.generator.context_tokens,
            drops_zero_variance=config.algorithm.zero_variance_groups == "drop",
            held_out=questions,
        )
    log.info("%d groups to replay; left out: %s", len(stored.groups), dict(stored.left_out))
    return StoredReplay(stored, count, config.run.seed)


def _folders(config: Config) -> list[Path]:
    examples = [folder_of_datasets(config.run.dir)] if config.replay.datasets else []
    return [*config.replay.runs, *examples]
