"""Ends a run whose updates went wrong, and leaves what a person needs to see why.

Used by trainer ranks. Every decision rests on figures that are equal on all ranks, so that all of
them end together.
"""

import math
from pathlib import Path

import msgspec
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol import wire
from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.mismatch import mean_mismatch
from megatron_rl.trainer.optimizer import StepResult


class SkippedMinibatch(msgspec.Struct, frozen=True):
    """One data-parallel rank's part of the last minibatch whose update was skipped."""

    version: int
    """Policy version that was being trained from."""
    dp_rank: int
    reason: str
    grad_norm: float
    """nan where it was not finite."""
    minibatch: MinibatchShare


def read_skipped(path: Path) -> SkippedMinibatch:
    """The file that a stopped run left. Raises WireError for another kind of file."""
    return wire.decode(path.read_bytes(), SkippedMinibatch)


class StepGuard:
    """Counts skipped updates, and holds the mismatch to its limit."""

    def __init__(self, cfg: TrainConfig, folder: Path) -> None:
        """folder: where the offending minibatch is written, made when that happens."""
        self._cfg = cfg
        self._folder = folder
        self._skipped_in_a_row = 0

    def check_mismatch(self, sums: Tensor, *, version: int) -> None:
        """Raise TrainingStopped above expert.train.max_mismatch; before the update is applied.

        sums: of mismatch_sums, over all ranks. Nothing happens where no token counts.
        """
        mean, limit = mean_mismatch(sums), self._cfg.max_mismatch
        if limit and mean > limit:
            raise TrainingStopped(
                f"at version {version} the logprobs of trainer and generator differ by {mean:.4g} "
                f"on average, more than expert.train.max_mismatch={limit:g}: they do not run the "
                "same policy. Look at weight sync, dtypes and generator.quantization, or raise the "
                "limit"
            )

    def count(self, result: StepResult, minibatch: MinibatchShare, *, version: int) -> None:
        """Raise TrainingStopped after expert.train.max_skipped_updates skipped ones in a row.

        Collective over all trainer ranks then: each data-parallel rank's part is written first.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.was_skipped else 0
        if self._skipped_in_a_row < self._cfg.max_skipped_updates:
            return
        self._write(result, minibatch, version)
        # An error ends the other ranks too: not before each has written its file.
        dist.barrier()
        raise TrainingStopped(
            f"{self._skipped_in_a_row} updates in a row were skipped "
            f"(expert.train.max_skipped_updates), the last at version {version}: {result.reason}. "
            f"Its minibatch is in {self._folder}, for megatron_rl.trainer.guard.read_skipped; "
            "consider a lower optimizer.lr, and the mismatch and gradient norm of the steps before"
        )

    def _write(self, result: StepResult, minibatch: MinibatchShare, version: int) -> None:
        # One of the ranks that work on the same sequences.
        context_rank = parallel_state.get_context_parallel_rank()
        if parallel_state.get_model_parallel_group().rank() or context_rank:
            return
        dp_rank = parallel_state.get_data_parallel_rank()
        norm = result.grad_norm if math.isfinite(result.grad_norm) else math.nan
        skipped = SkippedMinibatch(version, dp_rank, result.reason, norm, minibatch)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"version-{version:06d}.dp-{dp_rank}.msgpack"
        path.write_bytes(wire.encode(skipped))
