"""The sections `[[stages]]`: changes of the rules during a run. Part of the configuration tree.

Stage 0 is the configuration itself; each of `[[stages]]` changes values of the stage before it.
`staging.py` builds the stages.
"""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section

PlateauMetric = Literal["rollout/reward", "rollout/correct", "rollout/format"]


class Plateau(Section):
    """Start a stage when a metric of the stage before it stops growing."""

    metric: PlateauMetric = "rollout/reward"
    """Watched metric: reward, share of right completions, or share that passes the format check.
    It is a mean over a batch and the groups dropped before it."""
    window: PositiveInt
    """Number of latest batches whose mean is compared with the mean of as many earlier batches."""
    min_gain: float
    """Smallest gain that is no plateau."""


class StageSampling(Section):
    """A stage's changes of `[sampling]`."""

    max_new_tokens: PositiveInt | None = None
    """Maximum number of new tokens per completion."""
    temperature: PositiveFloat | None = None
    """Sampling temperature. The trainer divides its logits by that of the batch's stage."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling: total probability of the tokens to sample from."""


class StageReward(Section):
    """A stage's changes of `[reward]`: the length rule."""

    length: NonNegativeFloat | None = None
    """Maximum length penalty."""
    length_margin_tokens: int | None = Field(default=None, ge=0)
    """Number of tokens before the length limit over which the length penalty grows."""


class StageTrain(Section):
    """A stage's changes of `[train]`."""

    prompts_per_batch: PositiveInt | None = None
    """Number of prompts (groups of completions) per batch, not counting zero-variance groups."""
    group_size: int | None = Field(default=None, ge=2)
    """Completions of one prompt."""
    minibatches: PositiveInt | None = None
    """Number of optimizer steps per batch."""


class StageQueue(Section):
    """A stage's changes of `[queue]`."""

    max_staleness: int | None = Field(default=None, ge=0)
    """Number of policy versions that a typical rollout may lag when it is trained on."""


class StageConfig(Section):
    """One stage after the first. Keys that it does not name keep the value of the stage before
    it."""

    name: str = ""
    """Name of the stage in logs and `megatron-rl plan`."""
    at_step: PositiveInt | None = None
    """First batch of the stage, counted from 0."""
    plateau: Plateau | None = None
    """In place of at_step: start the stage when the one before it stops gaining."""
    sampling: StageSampling = StageSampling()
    reward: StageReward = StageReward()
    train: StageTrain = StageTrain()
    queue: StageQueue = StageQueue()
    weights: dict[str, NonNegativeFloat] = {}
    """New weights in the mixture, by name of a source in `[[prompts]]` or by its number from 0.
    Weight 0: nothing is drawn from that source."""

    @model_validator(mode="after")
    def _check_trigger(self) -> Self:
        if (self.at_step is None) == (self.plateau is None):
            raise ValueError(
                "a stage needs one of at_step and plateau: give the batch with which it begins, or "
                "plateau = {metric, window, min_gain}"
            )
        return self

    def changes(self) -> dict[str, dict[str, Any]]:
        """The stage's changes, by section."""
        sections = ("sampling", "reward", "train", "queue")
        return {name: getattr(self, name).model_dump(exclude_none=True) for name in sections}
