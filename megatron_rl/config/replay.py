"""The section `[replay]` of the configuration tree: groups that are not sampled for the step."""

from pathlib import Path
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_rl.config.section import Section


class ReplayConfig(Section):
    """Recorded rollouts, examples with rewards, or the run's own latest groups."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of recorded groups in each batch; 1: completions are sampled only for evaluations."""
    runs: list[Path] = []
    """Run folders whose recorded rollouts are trained on; they need the same tokenizer."""
    datasets: list[Path] = []
    """JSONL files of {"prompt": text or messages, "response": text, "reward": number}; lines with
    the same prompt are one group. They have no generator's logprobs."""
    buffer_groups: NonNegativeInt = 0
    """Number of this run's latest trained groups that are kept and trained on again."""
    max_age: PositiveInt = 8
    """buffer_groups: maximum number of policy versions that a group's oldest token may lag when
    it is drawn."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        has_files = bool(self.runs or self.datasets)
        if has_files and self.buffer_groups:
            raise ValueError(
                f"replay.buffer_groups={self.buffer_groups} (groups of this run) excludes "
                "replay.runs and replay.datasets (groups of files): set one of them"
            )
        has_source = has_files or self.buffer_groups > 0
        if has_source and not self.share:
            raise ValueError(
                "replay names what to train on, and replay.share=0 takes none of it: set the share "
                "of a batch's groups, such as 0.5"
            )
        if self.share and not has_source:
            raise ValueError(
                f"replay.share={self.share:g} has nothing to draw from: name replay.runs or "
                "replay.datasets, or set replay.buffer_groups"
            )
        if self.buffer_groups and self.share == 1:
            raise ValueError(
                "replay.share=1 leaves no group to be sampled, which replay.buffer_groups could "
                "keep: lower the share"
            )
        return self

    def steps_in_buffer(self, sampled_groups: int) -> int:
        """Steps that fill the buffer, with `sampled_groups` per step; 0 without a buffer."""
        return -(-self.buffer_groups // max(1, sampled_groups))

    def groups_of(self, prompts_per_batch: int) -> int:
        """Number of replayed groups per batch. Raises ValueError for a fraction."""
        groups = self.share * prompts_per_batch
        if abs(groups - round(groups)) > 1e-6:
            raise ValueError(
                f"replay.share={self.share:g} of train.prompts_per_batch={prompts_per_batch} is "
                f"{groups:g} groups: set a share that gives a whole number"
            )
        return round(groups)
