"""Decides which stage each batch belongs to, and when the next stage begins. Pure.

Used by the rollout queue. All groups of a batch have the stage of the batch, whose rules open,
sample and judge them. Groups of a new stage are opened ahead, while the last batches of the
previous stage are collected.
"""

import logging
import math
from collections.abc import Sequence

from megatron_rl.config.errors import InputError
from megatron_rl.config.stages import StageConfig
from megatron_rl.config.staging import name_of, resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.queue_state import StageState
from megatron_rl.protocol.types import LengthRule, RankBatch

log = logging.getLogger(__name__)


def has_plateaued(values: Sequence[float], *, window: int, min_gain: float) -> bool:
    """Whether the mean of the last `window` values gained less than min_gain on the window before.

    False for fewer than two windows.
    """
    if len(values) < 2 * window:
        return False
    recent, before = values[-window:], values[-2 * window : -window]
    return sum(recent) / window - sum(before) / window < min_gain


def _metric_of(trigger: StageConfig) -> str:
    """The metric whose plateau begins a stage; "" for one that begins at a step."""
    return trigger.plateau.metric if trigger.plateau is not None else ""


def length_rule(stage: Config) -> LengthRule:
    reward = stage.reward
    return LengthRule(stage.sampling.max_new_tokens, reward.length_margin_tokens, reward.length)


class Schedule:
    """The stages of a run, and their first batches as far as known."""

    def __init__(self, config: Config) -> None:
        self.stages = resolve_stages(config)
        self._config = config
        self._triggers = config.stages
        self._first_steps = [0]
        self._values: list[float] = []
        """Plateau metric of the current stage, by batch."""
        self._extend()

    def first_step(self, stage: int) -> int | None:
        """The first batch of a stage; None while unknown."""
        return self._first_steps[stage] if stage < len(self._first_steps) else None

    def end_step(self, stage: int) -> int:
        """The batch after the last batch of a stage, as far as known."""
        steps = self._config.train.steps
        following = self.first_step(stage + 1)
        return steps if following is None else min(following, steps)

    def stage_at(self, step: int) -> int:
        return max(n for n, first in enumerate(self._first_steps) if first <= step)

    def open_stages(self, step: int) -> range:
        """Stages whose groups may be opened when the next batch is that of `step`."""
        return range(self.stage_at(step), len(self._first_steps))

    def at(self, step: int) -> Config:
        return self.stages[self.stage_at(step)]

    def metrics(self, step: int) -> list[Metric]:
        return [Metric("queue/stage", self.stage_at(step), "max")] if self._triggers else []

    def note_batch(self, batch: RankBatch, untaken: int) -> None:
        """Note a built batch. untaken: groups of its stage that are in no batch.

        If the stage reached its plateau, the next stage begins after the batches that these groups
        fill, so that every group gets into a batch of its stage.
        """
        stage = self.stage_at(batch.step)
        if stage + 1 != len(self._first_steps) or stage == len(self._triggers):
            return
        plateau = self._triggers[stage].plateau
        assert plateau is not None, "a stage with at_step follows at once"
        total, count, _ = batch.metrics.get(plateau.metric, (0.0, 0.0, "mean"))
        if count:
            self._values.append(total / count)
        if not has_plateaued(self._values, window=plateau.window, min_gain=plateau.min_gain):
            return
        per_batch = self.stages[stage].sampled_groups
        left = math.ceil(untaken / per_batch) if per_batch else 0
        self._begin(batch.step + 1 + left)
        log.info(
            "%s stopped gaining by batch %d: %s begins with batch %d",
            name_of(self._config, stage), batch.step,
            name_of(self._config, stage + 1), self._first_steps[stage + 1],
        )  # fmt: skip
        self._extend()

    def _begin(self, step: int) -> None:
        self._first_steps.append(step)
        self._values = []

    def _extend(self) -> None:
        """Set the first batches that are known now; each stage has at least one batch."""
        for trigger in self._triggers[len(self._first_steps) - 1 :]:
            if trigger.at_step is None:
                return
            self._begin(max(trigger.at_step, self._first_steps[-1] + 1))

    def log_beginning(self, step: int) -> None:
        stage = self.stage_at(step)
        if stage and self._first_steps[stage] == step:
            log.info("batch %d is the first of %s", step, name_of(self._config, stage))

    def state(self) -> StageState:
        metrics = [_metric_of(trigger) for trigger in self._triggers[: len(self._first_steps)]]
        return StageState(list(self._first_steps), list(self._values), metrics)

    def restore(self, state: StageState, step: int) -> None:
        """Restore the state of a step. Raises InputError for a stage that the run lacks.

        Stages that have not begun follow the configuration, which may have changed: one that a
        plateau begins keeps what was decided or measured for a plateau of the same metric alone.
        """
        begun = [first for first in state.first_steps if first <= step] or [0]
        if len(begun) > len(self.stages):
            raise InputError(
                f"the saved run was in stage {len(begun) - 1}, but this configuration has only "
                f"{len(self._triggers)} [[stages]]: resume with the stages of the saved run"
            )
        self._first_steps, self._values = begun, []
        trigger = self._triggers[len(begun) - 1] if len(begun) < len(self.stages) else None
        saved = state.plateau_metrics[len(begun) - 1 :]
        if trigger is not None and trigger.plateau is not None:
            if not saved or saved[0] == trigger.plateau.metric:
                self._values = list(state.values)
                if decided := state.first_steps[len(begun) :]:
                    self._begin(decided[0])
        self._extend()
        log.info("resumed in %s", name_of(self._config, self.stage_at(step)))
