"""Files about single steps: values of each token (`TokenRecord`) and profiles (`StepProfile`).

Runs in trainer ranks.
"""

import logging
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.profiler import profile

from megatron_rl.backend.profiling import recorded_activities
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import write_when_room
from megatron_rl.protocol.trained_tokens import TrainedTokens, trained_path, write_trained
from megatron_rl.protocol.types import MinibatchShare, TrainSequence

log = logging.getLogger(__name__)


class TokenRecord:
    """Values of each token of a batch, written next to the recorded rollouts.

    The ranks whose losses count write, one per data-parallel replica. `protocol/trained_tokens.py`
    has the format.
    """

    def __init__(self, run_dir: Path, dp_rank: int, *, limit_s: float = 0.0) -> None:
        """limit_s: how long a full disk is waited for."""
        self._run_dir, self._limit_s = run_dir, limit_s
        self._dp_rank = dp_rank
        self._microbatches: list[Tensor] = []
        self._rollouts: list[tuple[int, int]] = []
        self._found: list[np.ndarray] = []

    def keep(self, logprobs: Tensor, entropies: Tensor, advantages: Tensor) -> None:
        """Values of the next microbatch: [completion tokens] each, its sequences end to end."""
        self._microbatches.append(torch.stack([logprobs, entropies, advantages]).detach().float())

    def end_minibatch(self, minibatch: MinibatchShare) -> None:
        """Assign the values kept since the last call to the minibatch's sequences, in order."""
        # Placeholders follow real microbatches. Stages without a loss keep nothing.
        assert not self._microbatches or len(self._microbatches) >= len(minibatch.microbatches)
        for sequences, kept in zip(minibatch.microbatches, self._microbatches, strict=False):
            values = kept.cpu().numpy()
            ends = np.cumsum([len(sequence.generator_logprobs) for sequence in sequences])
            for sequence, part in zip(sequences, np.split(values, ends, axis=1), strict=False):
                if _is_recorded(sequence):
                    self._rollouts.append(sequence.rollout)
                    self._found.append(part)
        self._microbatches.clear()

    def write(self, step: int) -> None:
        """Write the batch of `step` and forget it. Raises WriteFailed."""
        if self._found:
            ends = np.cumsum([part.shape[1] for part in self._found])
            found = TrainedTokens(*np.concatenate(self._found, axis=1))
            rollouts = np.array(self._rollouts, np.int64)
            path = trained_path(self._run_dir, step, self._dp_rank)
            write = partial(write_trained, path, rollouts, ends, found)
            write_when_room(path, write, limit_s=self._limit_s)
        self._rollouts.clear()
        self._found.clear()


class StepProfile(Closing):
    """A trace by torch's profiler (`train.profile_steps`, `sft.profile_steps`), for Perfetto.

    From the start of the first step to the start of the step after the last. One rank of each
    pipeline stage writes a file below RUN/profile/.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        """steps: first and last, counted from 1; None records nothing."""
        self._steps, self._folder = steps, folder
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """Call before the batch of `step`."""
        if self._steps is None or not _writes_profile():
            return
        first, last = self._steps
        if self._profile is None and first <= step <= last:
            self._profile = profile(activities=recorded_activities())
            self._profile.start()
        elif step > last:
            self.close()

    def close(self) -> None:
        """Write the profile."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        path = self._folder / f"stage_{stage}.json"
        recorded.export_chrome_trace(str(path))
        log.info("wrote the profile of steps %s: %s", self._steps, path)


def _writes_profile() -> bool:
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0


def _is_recorded(sequence: TrainSequence) -> bool:
    """Whether a line of the step's rollouts has exactly these tokens."""
    return sequence.rollout[0] >= 0 and not sequence.gold_tokens
