"""A microbatch is filled up to a count of positions by sequences that predict nothing."""

import msgspec
import numpy as np
import pytest
import torch

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_rl.trainer.model.collate import FILL_TOKENS as PIECE
from megatron_rl.trainer.model.collate import check_fits, collate, fill
from megatron_rl.trainer.model.policy import Policy
from tests.tiny_batches import VOCAB, make_sequences


def test_filling_comes_after_the_sequences_in_pieces_of_their_tokens() -> None:
    plain = collate(make_sequences(), multiple=2)
    has = plain.tokens.shape[1]
    positions = has + 2 * PIECE + 5
    filled = fill(plain, positions, vocab=VOCAB)
    assert filled.tokens.shape == filled.position_ids.shape == (1, positions)
    assert torch.equal(filled.tokens[:, :has], plain.tokens)
    assert filled.tokens[0, has:].tolist() == np.resize(plain.tokens[0], 2 * PIECE + 5).tolist()
    ends = [has + PIECE, has + 2 * PIECE, positions]
    assert filled.sequence_starts.tolist() == [*plain.sequence_starts.tolist(), *ends]
    assert filled.sequence_starts.dtype == torch.int32
    assert filled.position_ids[0, has:].tolist() == [*range(PIECE), *range(PIECE), *range(5)]
    assert max(filled.lengths) == PIECE > max(plain.lengths)
    changed = {"tokens", "position_ids", "sequence_starts", "lengths", "filling"}
    for name in vars(plain).keys() - changed:
        before, after = getattr(plain, name), getattr(filled, name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before is after


def test_filling_counts_for_no_position() -> None:
    plain = collate(make_sequences())
    filled = fill(plain, plain.rows + 7, vocab=VOCAB)
    assert filled.rows == plain.rows == sum(len(s.token_ids) for s in make_sequences())
    assert fill(plain, plain.rows, vocab=VOCAB) is plain


def test_an_empty_microbatch_is_filled_with_different_tokens() -> None:
    filled = fill(collate([]), 2 * VOCAB, vocab=VOCAB)
    # The same token everywhere would send all positions to the same experts.
    assert filled.tokens[0, 2:].bincount(minlength=VOCAB).max() <= 2
    assert int(filled.tokens.max()) == VOCAB - 1
    assert filled.weights.tolist() == [0.0] and filled.group_of.tolist() == [-1]


def test_no_choice_of_an_expert_is_recorded_for_filling() -> None:
    sequence = make_sequences()[0]
    count = len(sequence.token_ids) - 1
    chosen = msgspec.structs.replace(sequence, expert_choices=np.zeros(count * 6, np.int8))
    plain = collate([chosen], choice_width=6, experts=4)
    filled = fill(plain, count + 4, vocab=VOCAB)
    assert filled.expert_choices.shape == (count + 4, 6)
    assert (filled.expert_choices[:count] == 0).all() and (filled.expert_choices[count:] < 0).all()


def test_more_than_fits_is_refused_with_the_count_that_would_do() -> None:
    with pytest.raises(InputError, match="of 101 tokens do not fit into the 96 .* at least 101"):
        fill(collate(make_sequences()), 96, vocab=VOCAB)
    check_fits(96, 96)


@pytest.mark.parametrize(
    ("tokens", "recipe", "positions"),
    [(8192, "none", 8192), (8190, "none", 8192), (8191, "tensorwise", 8192)],
)
def test_every_microbatch_has_the_budget_rounded_up(
    tokens: int, recipe: str, positions: int
) -> None:
    parallel = ParallelConfig(tensor=4, sequence=True)
    train = TrainConfig(pad_microbatches=True, microbatch_tokens=tokens, steps=0)
    cfg = Config(model=ModelConfig(fp8=recipe), parallel=parallel, train=train)
    policy = Policy(backend=None, shape=None, chunks=[], parallel=parallel, cfg=cfg)
    assert policy.fixed_positions == positions
