"""Which positions a model has to compute of sequences that share prompts.

Runs in trainer ranks, for `collate.py`. Two kinds are left out. A prompt is computed only in
the first sequence that begins with it. The last position of each sequence predicts nothing, and
nothing attends to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.protocol.types import TrainSequence


@dataclass(frozen=True)
class Shared:
    """Sequences laid end to end without their last tokens, and the positions they share."""

    lengths: list[int]
    """Rows of each sequence."""
    tokens: np.ndarray
    """[rows] int32."""
    positions: np.ndarray
    """[rows] int64: the position that holds the row's token and all before it in its sequence."""
    rows: np.ndarray
    """[positions] int64: the first row of each position."""
    loss_positions: np.ndarray
    """[completion tokens] int64: the position that predicts each."""


def share_prompts(sequences: Sequence[TrainSequence], *, multiple: int = 1) -> Shared:
    """Positions in the order of the sequences.

    multiple: the count of positions is padded up to a multiple of it by a separate sequence.
    """
    prompts: dict[bytes, np.ndarray] = {}
    rows, positions, loss_positions = [], [], []
    count = 0
    for sequence in sequences:
        prompt, n_targets = sequence.prompt_length, len(sequence.token_ids) - sequence.prompt_length
        row_tokens = sequence.token_ids[: prompt + max(n_targets - 1, 0)]
        key = row_tokens[:prompt].tobytes()
        if key not in prompts:
            prompts[key] = np.arange(count, count + prompt)
            count += prompt
        own = np.arange(count, count + len(row_tokens) - prompt)
        count += len(own)
        rows.append(row_tokens)
        positions.append(np.concatenate([prompts[key], own]))
        loss_positions.append(positions[-1][prompt - 1 : prompt - 1 + n_targets])
    if missing := -count % multiple:
        rows.append(np.zeros(missing, np.int32))
        positions.append(np.arange(count, count + missing))
    flat = np.concatenate(positions)
    return Shared(
        lengths=[len(row) for row in rows],
        tokens=np.concatenate(rows),
        positions=flat,
        rows=np.unique(flat, return_index=True)[1],
        loss_positions=np.concatenate(loss_positions),
    )
