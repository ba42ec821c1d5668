"""Sequences -> tensors of one packed microbatch.

Runs in trainer ranks. The only place that converts between "this position predicts the next token"
and "this token": row `rows[i]` of the model's output predicts `targets[i]`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.protocol.process import InputError
from megatron_rl.protocol.types import TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """Sequences laid end to end; `rows` are the positions that predict a completion token."""

    tokens: Tensor  # [1, positions] int64
    position_ids: Tensor  # [1, positions] int64, from 0 in each sequence
    sequence_starts: Tensor  # [sequences + 1] int32, cumulative lengths
    longest: int  # positions of the longest sequence
    rows: Tensor  # [completion tokens] int64, index into positions
    targets: Tensor  # [completion tokens] int64, token id
    generator_logprobs: Tensor  # [completion tokens] float32
    advantages: Tensor  # [completion tokens] float32
    weights: Tensor  # [completion tokens] float32
    versions: Tensor  # [completion tokens] int64, policy version that sampled the token
    expert_choices: Tensor | None = None  # [positions, layers x experts of a token] int64, or -1

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        return MicroBatch(**moved)


def placeholder() -> TrainSequence:
    """A sequence without weight: an empty microbatch still runs, as its collectives must match."""
    one = np.zeros(1, np.int32)
    return TrainSequence(np.zeros(2, np.int32), 1, np.zeros(1, np.float32), one - 1, 0.0, 0.0)


def collate(
    sequences: list[TrainSequence], *, multiple: int = 1, choice_width: int = 0
) -> MicroBatch:
    """Pack sequences into one microbatch without padding between them.

    multiple: the count of positions is padded up to a multiple of it by a sequence without
    weight (sequence parallelism needs a multiple of the tensor-parallel size).
    choice_width: layers x experts of a token, to take the generator's choices along; else 0.
    Raises InputError for a sequence without them.
    """
    sequences = list(sequences) or [placeholder()]
    missing = -sum(len(s.token_ids) for s in sequences) % multiple
    lengths = [len(s.token_ids) for s in sequences] + ([missing] if missing else [])
    tokens = np.concatenate([s.token_ids for s in sequences] + [np.zeros(missing, np.int32)])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = [
        np.arange(start + s.prompt_length - 1, start + len(s.token_ids) - 1)
        for s, start in zip(sequences, starts, strict=False)
    ]
    counts = [len(s.token_ids) - s.prompt_length for s in sequences]
    return MicroBatch(
        tokens=_tensor(tokens, torch.int64)[None],
        position_ids=_tensor(np.concatenate([np.arange(n) for n in lengths]), torch.int64)[None],
        sequence_starts=_tensor(starts, torch.int32),
        longest=max(lengths),
        rows=_tensor(np.concatenate(rows), torch.int64),
        targets=_tensor(
            np.concatenate([s.token_ids[s.prompt_length :] for s in sequences]), torch.int64
        ),
        generator_logprobs=_tensor(
            np.concatenate([s.generator_logprobs for s in sequences]), torch.float32
        ),
        advantages=_tensor(np.repeat([s.advantage for s in sequences], counts), torch.float32),
        weights=_tensor(np.repeat([s.weight for s in sequences], counts), torch.float32),
        versions=_tensor(np.concatenate([s.token_versions for s in sequences]), torch.int64),
        expert_choices=_choices(sequences, missing, choice_width) if choice_width else None,
    )


def _choices(sequences: list[TrainSequence], missing: int, width: int) -> Tensor:
    """[positions, width]; -1 at the last position of each sequence, which predicts nothing."""
    rows = []
    for s in sequences:
        count = len(s.token_ids) - 1
        if len(s.expert_choices) == count * width:
            rows.append(s.expert_choices.reshape(count, width))
        elif s.weight:
            raise InputError(
                f"train.router_replay: a sequence of {count + 1} tokens has "
                f"{len(s.expert_choices)} expert choices instead of {count * width}: does the "
                "engine return them for this model? Else set train.router_replay=false"
            )
        else:
            rows.append(np.full((count, width), -1))
        rows.append(np.full((1, width), -1))
    return _tensor(np.concatenate([*rows, np.full((missing, width), -1)]), torch.int64)


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.asarray(array), dtype=dtype)
