"""Sequences -> tensors of one packed microbatch; shared prompts, padding to one size.

Runs in trainer ranks. The only place that converts between "this position predicts the next token"
and "this token": the output at `loss_positions[i]` predicts `targets[i]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.backend.cpu.folding import Folding
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.types import TrainSequence

FILL_TOKENS = 512
"""Positions of a filling sequence, at most: attention costs the square of a length."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences laid end to end; a loss position is one that predicts a target token."""

    tokens: Tensor  # [1, positions] int64
    position_ids: Tensor  # [1, positions] int64, from 0 in each sequence
    sequence_starts: Tensor  # [sequences + 1] int32, cumulative lengths, of rows if folded
    lengths: tuple[int, ...]  # positions of each sequence, for code that shall not read a device
    loss_positions: Tensor  # [target tokens] int64, index into positions
    targets: Tensor  # [target tokens] int64, token id
    generator_logprobs: Tensor  # [target tokens] float32
    advantages: Tensor  # [target tokens] float32
    rewards: Tensor  # [target tokens] float32, each its sequence's
    weights: Tensor  # [target tokens] float32
    versions: Tensor  # [target tokens] int64, policy version that sampled the token
    is_gold: Tensor  # [target tokens] bool, of a reference answer, which no policy sampled
    sequence_of: Tensor  # [target tokens] int64, number of the sequence in the microbatch
    target_ends: Tensor  # [sequences] int64, one after the last completion token of each
    group_of: Tensor  # [sequences] int64, number of the group in the minibatch; -1: padding
    member_of: Tensor  # [sequences] int64, place in the group
    expert_choices: Tensor | None = None
    """[positions, layers x experts of a token] int16 or int32, -1 where none is recorded. In host
    memory, as they are large; each forward pass takes its microbatch's choices to the device."""
    folding: Folding | None = None  # None: positions are the sequences laid end to end
    places: Tensor | None = None
    """Context ranks: [completion tokens of the rank] int64, index into those of the microbatch.
    Positions and targets are the rank's own; all other values are the whole microbatch's."""
    filling: int = 0
    """Positions at the end that give all microbatches one size (`fill`)."""
    temperature: float = 1.0
    """As in MinibatchShare."""

    @property
    def rows(self) -> int:
        """Positions of the sequences laid end to end; each sequence counts shared positions."""
        if self.folding is not None:
            return len(self.folding.positions)
        return self.tokens.shape[1] - self.filling

    def moved(self, send: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """The same with all tensors on the device, except expert choices."""
        moved = {
            name: send(value) if isinstance(value, Tensor) and name != "expert_choices" else value
            for name, value in vars(self).items()
        }
        return MicroBatch(**moved)


def placeholder() -> TrainSequence:
    """A sequence without weight: an empty microbatch still runs, as its collectives must match."""
    ids, logprobs = np.zeros(2, np.int32), np.zeros(1, np.float32)
    return TrainSequence(ids, 1, logprobs, [(-1, 1)], advantage=0.0, weight=0.0, group=-1)


def collate(
    sequences: list[TrainSequence],
    *,
    multiple: int = 1,
    sequence_multiple: int = 1,
    choice_width: int = 0,
    experts: int = 0,
    shares_prompts: bool = False,
) -> MicroBatch:
    """Pack sequences into one microbatch.

    multiple: a sequence without weight pads the count of positions to a multiple of it
    (sequence parallelism needs a multiple of the tensor-parallel size).
    sequence_multiple: every sequence is padded at its end to a multiple of it, and so is
    `multiple` (context parallelism cuts each sequence into equal chunks).
    choice_width: layers x experts of a token, to include the generator's choices; else 0.
    experts: number of experts of the model, with choice_width.
    shares_prompts: compute common prompts once (`cpu/folding.py`); excludes sequence_multiple
    and choice_width.
    Raises InputError for a sequence without expert choices, or with one that the model lacks.
    """
    sequences = list(sequences) or [placeholder()]
    if shares_prompts:
        assert sequence_multiple == 1 and not choice_width
        return _collate_shared(sequences, multiple)
    rows = rows_of(sequences)
    padded = [np.pad(ids, (0, -len(ids) % sequence_multiple)) for ids, _ in rows]
    missing = -sum(map(len, padded)) % multiple
    lengths = [len(ids) for ids in padded] + ([missing] if missing else [])
    tokens = np.concatenate([*padded, np.zeros(missing, np.int32)])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    loss_positions = [
        start + targets - 1 for (_, targets), start in zip(rows, starts, strict=False)
    ]
    return MicroBatch(
        tokens=_tensor(tokens, torch.int64)[None],
        position_ids=_tensor(np.concatenate([np.arange(n) for n in lengths]), torch.int64)[None],
        sequence_starts=_tensor(starts, torch.int32),
        lengths=tuple(lengths),
        loss_positions=_tensor(np.concatenate(loss_positions), torch.int64),
        **_per_target(sequences, rows),
        expert_choices=(
            _choices(sequences, lengths, choice_width, experts) if choice_width else None
        ),
    )


def rows_of(sequences: Sequence[TrainSequence]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, indices of the target tokens) of each row, sequence after sequence.

    A row is what attends to itself alone: a sequence, or one branch of its conversation.
    """
    found = []
    for sequence in sequences:
        targets = sequence.targets
        for start, end in sequence.rows:
            own = targets[(targets >= start) & (targets < end)] - start
            found.append((sequence.token_ids[start:end], own))
    return found


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
    """[target tokens] int64: the position that predicts each."""


def share_prompts(sequences: Sequence[TrainSequence], *, multiple: int = 1) -> Shared:
    """Leave out repeated prompts and last positions; positions stay in the order of the sequences.

    A prompt is computed only in the first sequence that begins with it. The last position of a
    sequence predicts nothing, and nothing attends to it.

    multiple: the count of positions is padded up to a multiple of it by a separate sequence.
    """
    prompts: dict[bytes, np.ndarray] = {}
    rows, positions, loss_positions = [], [], []
    count = 0
    for token_ids, targets in rows_of(sequences):
        prompt = int(targets[0]) if len(targets) else len(token_ids)
        row_tokens = token_ids[: max(prompt, len(token_ids) - 1)]
        key = row_tokens[:prompt].tobytes()
        if key not in prompts:
            prompts[key] = np.arange(count, count + prompt)
            count += prompt
        own = np.arange(count, count + len(row_tokens) - prompt)
        count += len(own)
        rows.append(row_tokens)
        positions.append(np.concatenate([prompts[key], own]))
        loss_positions.append(positions[-1][targets - 1])
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


def _collate_shared(sequences: list[TrainSequence], multiple: int) -> MicroBatch:
    shared = share_prompts(sequences, multiple=multiple)
    starts = np.concatenate([[0], np.cumsum(shared.lengths)])
    position_ids = np.concatenate([np.arange(n) for n in shared.lengths])
    return MicroBatch(
        tokens=_tensor(shared.tokens[shared.rows], torch.int64)[None],
        position_ids=_tensor(position_ids[shared.rows], torch.int64)[None],
        sequence_starts=_tensor(starts, torch.int32),
        lengths=tuple(shared.lengths),
        loss_positions=_tensor(shared.loss_positions, torch.int64),
        **_per_target(sequences, rows_of(sequences)),
        folding=Folding(_tensor(shared.positions, torch.int64), _tensor(shared.rows, torch.int64)),
    )


def _per_target(
    sequences: list[TrainSequence], rows: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[str, Tensor]:
    """rows: of `rows_of`."""
    counts = [len(s.generator_logprobs) for s in sequences]
    ids = np.concatenate([ids[targets] for ids, targets in rows])
    logprobs = np.concatenate([s.generator_logprobs for s in sequences])
    versions = np.concatenate([s.token_versions for s in sequences])

    def repeated(values: list[float]) -> Tensor:
        return _tensor(np.repeat(values, counts), torch.float32)

    return {
        "targets": _tensor(ids, torch.int64),
        "generator_logprobs": _tensor(logprobs, torch.float32),
        "advantages": _tensor(np.concatenate([_advantages(s) for s in sequences]), torch.float32),
        "rewards": repeated([s.reward for s in sequences]),
        "weights": repeated([s.weight for s in sequences]),
        "versions": _tensor(versions, torch.int64),
        "is_gold": _tensor(np.concatenate([_is_gold(s) for s in sequences]), torch.bool),
        "sequence_of": _tensor(np.repeat(np.arange(len(counts)), counts), torch.int64),
        "target_ends": _tensor(np.cumsum(counts), torch.int64),
        "group_of": _tensor([s.group for s in sequences], torch.int64),
        "member_of": _tensor([s.member for s in sequences], torch.int64),
    }


def _advantages(sequence: TrainSequence) -> np.ndarray:
    if len(sequence.turn_advantages):
        return sequence.turn_advantages
    return np.full(len(sequence.generator_logprobs), sequence.advantage)


def _is_gold(sequence: TrainSequence) -> np.ndarray:
    count = len(sequence.generator_logprobs)
    return np.arange(count) >= count - sequence.gold_tokens


def context_shard(batch: MicroBatch, positions: Tensor) -> MicroBatch:
    """The microbatch of a context rank with these positions: tokens, and which positions predict.

    positions: int64, in the rank's order. Values of completion tokens, except
    targets, stay the whole microbatch's: losses see whole sequences.
    """
    places = torch.full((batch.tokens.shape[1],), -1)
    places[positions] = torch.arange(len(positions))
    loss_positions = places[batch.loss_positions]
    is_here = loss_positions >= 0
    return replace(
        batch,
        tokens=batch.tokens[:, positions],
        position_ids=batch.position_ids[:, positions],
        loss_positions=loss_positions[is_here],
        targets=batch.targets[is_here],
        places=is_here.nonzero()[:, 0],
        expert_choices=None if batch.expert_choices is None else batch.expert_choices[positions],
    )


def fill(batch: MicroBatch, positions: int, *, vocab: int) -> MicroBatch:
    """Pad the microbatch to `positions` positions (`expert.train.pad_microbatches`).

    Filling positions form separate sequences, which no other sequence sees, and predict nothing:
    loss, gradients and metrics come from the real sequences only. vocab: token ids are below it.
    Raises InputError for a microbatch with more positions.
    """
    has = batch.tokens.shape[1]
    check_fits(has, positions)
    missing = positions - has
    if not missing:
        return batch
    assert batch.folding is None and batch.places is None
    lengths = torch.full((-(-missing // FILL_TOKENS),), FILL_TOKENS)
    lengths[-1] = missing - FILL_TOKENS * (len(lengths) - 1)
    # The tokens of the sequences again: one repeated token would reach the same experts everywhere,
    # and a token of no sequence could set the scale of a tensor in FP8.
    is_empty = bool((batch.group_of < 0).all())
    ids = torch.arange(vocab) if is_empty else batch.tokens[0]
    filling = ids.repeat(-(-missing // len(ids)))[:missing]
    ends = batch.sequence_starts[-1] + lengths.cumsum(0)
    choices = batch.expert_choices
    if choices is not None:
        choices = torch.cat([choices, choices.new_full((missing, choices.shape[1]), -1)])
    return replace(
        batch,
        tokens=torch.cat([batch.tokens[0], filling])[None],
        position_ids=torch.cat([batch.position_ids[0], torch.arange(missing) % FILL_TOKENS])[None],
        sequence_starts=torch.cat([batch.sequence_starts, ends.int()]),
        lengths=(*batch.lengths, *lengths.tolist()),
        expert_choices=choices,
        filling=missing,
    )


def check_fits(tokens: int, positions: int) -> None:
    """Raise InputError for sequences that take more than the positions of a microbatch."""
    if tokens > positions:
        raise InputError(
            f"expert.train.pad_microbatches=true: sequences of {tokens} tokens do not fit into the "
            f"{positions} positions of a microbatch; raise train.microbatch_tokens to at least "
            f"{tokens}, or leave longer ones out"
        )


def _choices(
    sequences: list[TrainSequence], lengths: list[int], width: int, experts: int
) -> Tensor:
    """[positions, width]; -1 at positions without a recorded choice, which predict nothing.

    lengths: of the padded sequences, and of the padding after them.
    """
    narrow = np.result_type(np.int16, *(s.expert_choices.dtype for s in sequences))
    choices = np.full((sum(lengths), width), -1, narrow)
    starts = iter(np.concatenate([[0], np.cumsum(lengths)]))
    for sequence in sequences:
        count = len(sequence.token_ids) - 1
        places = [(*row, next(starts)) for row in sequence.rows]
        if len(sequence.expert_choices) == count * width:
            _check_experts(sequence.expert_choices, experts)
            found = sequence.expert_choices.reshape(count, width)
            # The last token of a row predicts nothing.
            for begin, end, start in places:
                choices[start : start + end - begin - 1] = found[begin : end - 1]
        elif sequence.weight:
            raise InputError(
                f"train.router_replay: a sequence of {count + 1} tokens has "
                f"{len(sequence.expert_choices)} expert choices instead of {count * width}: does "
                "the engine return them for this model? Else set train.router_replay=false"
            )
    return torch.from_numpy(choices)


def _check_experts(choices: np.ndarray, experts: int) -> None:
    """Raise InputError for an expert that the model lacks: a GPU router would read past its row."""
    if choices.dtype.kind not in "iu":
        raise InputError(f"train.router_replay: expert choices of {choices.dtype}, not integers")
    least, most = int(choices.min(initial=0)), int(choices.max(initial=0))
    # -1: none is recorded for the position.
    if least < -1 or most >= experts:
        raise InputError(
            f"train.router_replay: a choice of expert {most if most >= experts else least}, but "
            f"the model has experts 0 to {experts - 1}: does the engine serve the same model?"
        )


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.asarray(array), dtype=dtype)
