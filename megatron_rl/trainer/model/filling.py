"""Microbatches of one size (`expert.train.pad_microbatches`): free positions are filled.

Runs in trainer ranks. Filling positions form separate sequences, which no other sequence sees, and
predict nothing: loss, gradients and metrics come from the real sequences only.
"""

from dataclasses import replace

import torch

from megatron_rl.config.errors import InputError
from megatron_rl.trainer.model.collate import MicroBatch

PIECE = 512
"""Positions of a filling sequence, at most: attention costs the square of a length."""


def fill(batch: MicroBatch, positions: int, *, vocab: int) -> MicroBatch:
    """The microbatch with `positions` positions. vocab: token ids are below it.

    Raises InputError for one that has more.
    """
    has = batch.tokens.shape[1]
    check_fits(has, positions)
    missing = positions - has
    if not missing:
        return batch
    assert batch.folding is None and batch.places is None
    lengths = torch.full((-(-missing // PIECE),), PIECE)
    lengths[-1] = missing - PIECE * (len(lengths) - 1)
    # The tokens of the sequences once more: the same one everywhere would reach the same experts,
    # and one that no sequence has could set the scale of a tensor in FP8.
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
        position_ids=torch.cat([batch.position_ids[0], torch.arange(missing) % PIECE])[None],
        sequence_starts=torch.cat([batch.sequence_starts, ends.int()]),
        longest=max(batch.longest, int(lengths.max())),
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
