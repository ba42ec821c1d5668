"""The sections `[[stages]]`: a run whose rules change on the way.

Imported by every process, as part of the configuration tree. Stage 0 is the configuration itself;
each of `[[stages]]` changes something of the stage before it. `staging.py` puts them together.
"""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section

PlateauMetric = Literal["rollout/reward", "rollout/correct", "rollout/format"]


class Plateau(Section):
    """A stage begins when a metric of the batches of the stage before it stops to grow."""

    metric: PlateauMetric = "rollout/reward"
    """Mean over a batch and the groups that were dropped before it: of the reward, of the share of
    right ones, of the share of well-formed ones."""
    window: PositiveInt
    """Batches: the mean of the latest so many is compared with that of as many before them."""
    min_gain: float
    """Less gain than this is a plateau."""


class StageSampling(Section):
    """What a stage changes of `[sampling]`."""

    max_new_tokens: PositiveInt | None = None
    """Limit of a completion."""
    temperature: PositiveFloat | None = None
    """Sampling temperature. The trainer divides its logits by that of the batch's stage."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus."""


class StageReward(Section):
    """What a stage changes of `[reward]`: the length rule."""

    length: NonNegativeFloat | None = None
    """Largest length penalty."""
    length_margin_tokens: int | None = Field(default=None, ge=0)
    """The length penalty grows over so many last tokens before the limit."""


class StageTrain(Section):
    """What a stage changes of `[train]`."""

    prompts_per_batch: PositiveInt | None = None
    """Groups of completions, zero-variance ones not counted, that make a batch."""
    group_size: int | None = Field(default=None, ge=2)
    """Completions of one prompt."""
    minibatches: PositiveInt | None = None
    """Optimizer steps a batch."""


class StageQueue(Section):
    """What a stage changes of `[queue]`."""

    max_staleness: int | None = Field(default=None, ge=0)
    """Policy versions a typical rollout may lag when it is trained on."""


class StageConfig(Section):
    """One stage after the first; what it does not name stays as in the stage before it."""

    name: str = ""
    """For logs and `megatron-rl plan`."""
    at_step: PositiveInt | None = None
    """The first batch of the stage, counted from 0."""
    plateau: Plateau | None = None
    """In place of at_step: the stage begins once the one before it has stopped to gain."""
    sampling: StageSampling = StageSampling()
    reward: StageReward = StageReward()
    train: StageTrain = StageTrain()
    queue: StageQueue = StageQueue()
    weights: dict[str, NonNegativeFloat] = {}
    """New weights in the mixture, by the name of a source of `[[prompts]]`, or by its number from
    0; 0: nothing is drawn from it."""

    @model_validator(mode="after")
    def _check_trigger(self) -> Self:
        if (self.at_step is None) == (self.plateau is None):
            raise ValueError(
                "a stage needs one of at_step and plateau: give the batch with which it begins, or "
                "plateau = {metric, window, min_gain}"
            )
        return self

    def changes(self) -> dict[str, dict[str, Any]]:
        """What it changes, by section."""
        sections = ("sampling", "reward", "train", "queue")
        return {name: getattr(self, name).model_dump(exclude_none=True) for name in sections}
