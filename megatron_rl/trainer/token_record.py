"""Collects a step's values of each token, and writes them next to the recorded rollouts.

Runs in trainer ranks; the ranks whose losses count write, one per data-parallel replica.
`protocol/trained_tokens.py` has the format.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.protocol.trained_tokens import TrainedTokens, write_trained
from megatron_rl.protocol.types import MinibatchShare, TrainSequence


class TokenRecord:
    """Values of the batch in training."""

    def __init__(self, run_dir: Path, dp_rank: int) -> None:
        self._run_dir = run_dir
        self._dp_rank = dp_rank
        self._microbatches: list[Tensor] = []
        self._rollouts: list[tuple[int, int]] = []
        self._found: list[np.ndarray] = []

    def keep(self, logprobs: Tensor, entropies: Tensor, advantages: Tensor) -> None:
        """Values of the next microbatch: [completion tokens] each, its sequences end to end."""
        self._microbatches.append(torch.stack([logprobs, entropies, advantages]).detach().float())

    def end_minibatch(self, minibatch: MinibatchShare) -> None:
        """The microbatches that were kept since the last call are the minibatch's, in order."""
        # Placeholders follow the real ones. Stages without a loss keep nothing.
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
        """Write the batch of `step` and forget it. Raises InputError where that fails."""
        if self._found:
            ends = np.cumsum([part.shape[1] for part in self._found])
            found = TrainedTokens(*np.concatenate(self._found, axis=1))
            rollouts = np.array(self._rollouts, np.int64)
            write_trained(self._run_dir, step, self._dp_rank, rollouts, ends, found)
        self._rollouts.clear()
        self._found.clear()


def _is_recorded(sequence: TrainSequence) -> bool:
    """Whether a line of the step's rollouts has these very tokens."""
    return sequence.rollout[0] >= 0 and not sequence.gold_tokens
