"""Ends a run whose updates fail, and writes the minibatch that shows why.

Used by trainer ranks. Every decision rests on figures that are equal on all ranks, so all ranks end
together.
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
    """Policy version that the update started from."""
    dp_rank: int
    reason: str
    grad_norm: float
    """nan where it was not finite."""
    minibatch: MinibatchShare


def read_skipped(path: Path) -> SkippedMinibatch:
    """Read the file that a stopped run wrote. Raises WireError for another kind of file."""
    return wire.decode(path.read_bytes(), SkippedMinibatch)


class StepGuard:
    """Limits the updates skipped in a row, and the mismatch of logprobs."""

    def __init__(self, cfg: TrainConfig, folder: Path) -> None:
        """folder: for the minibatch of a skipped update; created when one is written."""
        self._cfg = cfg
        self._folder = folder
        self._skipped_in_a_row = 0

    def check_mismatch(self, sums: Tensor, *, version: int) -> None:
        """Raise TrainingStopped above expert.train.max_mismatch; call it before the update.

        sums: of mismatch_sums, over all ranks.
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
        """Raise TrainingStopped after expert.train.max_skipped_updates skipped updates in a row.

        Each data-parallel rank writes its part of the minibatch first: a collective over all ranks.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.was_skipped else 0
        if self._skipped_in_a_row < self._cfg.max_skipped_updates:
            return
        self._write(result, minibatch, version)
        # An error on one rank ends the others: each writes its file before.
        dist.barrier()
        raise TrainingStopped(
            f"{self._skipped_in_a_row} updates in a row were skipped "
            f"(expert.train.max_skipped_updates), the last at version {version}: {result.reason}. "
            f"Its minibatch is in {self._folder}, for megatron_rl.trainer.guard.read_skipped; "
            "consider a lower optimizer.lr, and the mismatch and gradient norm of the steps before"
        )

    def _write(self, result: StepResult, minibatch: MinibatchShare, version: int) -> None:
        # Only one of the ranks that work on the same sequences writes.
        context_rank = parallel_state.get_context_parallel_rank()
        if parallel_state.get_model_parallel_group().rank() or context_rank:
            return
        dp_rank = parallel_state.get_data_parallel_rank()
        norm = result.grad_norm if math.isfinite(result.grad_norm) else math.nan
        skipped = SkippedMinibatch(version, dp_rank, result.reason, norm, minibatch)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"version-{version:06d}.dp-{dp_rank}.msgpack"
        path.write_bytes(wire.encode(skipped))
