"""Packing sequences into one microbatch: rows, targets and per-token values."""

import msgspec
import numpy as np
import pytest
import torch

from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.model.collate import collate, context_shard, share_prompts


def make_sequence(
    tokens: list[int], prompt_length: int, advantage: float, weight: float
) -> TrainSequence:
    n = len(tokens) - prompt_length
    return TrainSequence(
        token_ids=np.array(tokens, np.int32),
        prompt_length=prompt_length,
        generator_logprobs=-np.arange(1, n + 1, dtype=np.float32),
        version_runs=[(7, n)],
        advantage=advantage,
        weight=weight,
    )


def test_each_row_predicts_the_token_after_it() -> None:
    batch = collate(
        [make_sequence([10, 11, 12, 13], 2, 0.5, 0.1), make_sequence([20, 21, 22], 1, -1.0, 0.2)]
    )
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.sequence_starts.tolist() == [0, 4, 7]
    assert max(batch.lengths) == 4
    # Positions 1 and 2 (tokens 11, 12) predict 12 and 13; 4 and 5 (20, 21) predict 21 and 22.
    assert batch.loss_positions.tolist() == [1, 2, 4, 5]
    assert batch.targets.tolist() == [12, 13, 21, 22]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0, -1.0]
    np.testing.assert_allclose(batch.weights.numpy(), [0.1, 0.1, 0.2, 0.2], rtol=1e-6)
    assert batch.generator_logprobs.tolist() == [-1, -2, -1, -2]
    assert batch.versions.tolist() == [7, 7, 7, 7]


def test_positions_are_padded_to_the_multiple_by_a_sequence_without_targets() -> None:
    batch = collate([make_sequence([1, 2, 3, 4, 5], 2, 1.0, 1.0)], multiple=4)
    assert batch.tokens.shape == (1, 8)
    assert batch.sequence_starts.tolist() == [0, 5, 8]
    assert batch.loss_positions.tolist() == [1, 2, 3]


def test_sequences_are_padded_for_context_ranks_at_their_ends() -> None:
    first, second = make_sequence([1, 2, 3, 4, 5], 2, 1.0, 1.0), make_sequence([6, 7], 1, 1.0, 1.0)
    batch = collate([first, second], multiple=16, sequence_multiple=4)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 0, 0, 0, 0, 0, 0]]
    assert batch.sequence_starts.tolist() == [0, 8, 12, 16]
    assert batch.loss_positions.tolist() == [1, 2, 3, 8] and batch.targets.tolist() == [3, 4, 5, 7]


def test_a_context_rank_sees_its_positions_and_their_rows() -> None:
    whole = collate([make_sequence([1, 2, 3, 4, 5, 6, 7, 8], 2, 1.0, 1.0)], sequence_multiple=4)
    batch = context_shard(whole, torch.tensor([0, 1, 6, 7]))
    assert batch.tokens.tolist() == [[1, 2, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 6, 7]]
    # Rows 1 to 6 predict; this rank holds positions 1 and 6, its second and third.
    assert batch.loss_positions.tolist() == [1, 2] and batch.targets.tolist() == [3, 8]
    # Losses see the whole sequence, and which of its tokens are here.
    assert batch.generator_logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
    assert batch.places.tolist() == [0, 5]
    assert batch.sequence_starts.tolist() == [0, 8]


def test_empty_microbatch_runs_one_token_without_weight() -> None:
    batch = collate([])
    assert batch.weights.tolist() == [0.0]
    assert batch.loss_positions.tolist() == [0]


def conversation() -> TrainSequence:
    """Prompt 1 2, reply 10 11, given 20 21, reply 12; then a branch 1 2 10 11 22, reply 13 14."""
    return TrainSequence(
        np.array([1, 2, 10, 11, 20, 21, 12, 1, 2, 10, 11, 22, 13, 14], np.int32),
        2, np.zeros(5, np.float32), [(0, 5)], advantage=0.0, weight=1.0,
        given=[(2, 4), (5, 10)], row_starts=[7],
        turn_advantages=np.array([1, 1, -1, 3, 3], np.float32),
    )  # fmt: skip


def test_given_tokens_are_no_targets_and_branches_see_only_themselves() -> None:
    assert conversation().find_fault() == ""
    batch = collate([conversation()])
    assert batch.targets.tolist() == [10, 11, 12, 13, 14]
    assert batch.loss_positions.tolist() == [1, 2, 5, 11, 12]
    assert batch.sequence_starts.tolist() == [0, 7, 14]
    assert batch.position_ids[0].tolist() == [*range(7), *range(7)]
    assert batch.advantages.tolist() == [1, 1, -1, 3, 3]
    # For the objective the rows are one sequence.
    assert batch.sequence_of.tolist() == [0] * 5 and batch.target_ends.tolist() == [5]


def test_the_shared_start_of_branches_is_computed_once() -> None:
    shared = share_prompts([conversation(), conversation()])
    tokens = shared.tokens[shared.rows].tolist()
    # The last token of a row predicts nothing.
    assert tokens == [1, 2, 10, 11, 20, 21, 1, 2, 10, 11, 22, 13, 10, 11, 20, 21, 13]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"given": [(2, 4), (4, 10)]}, "given ranges"),
        ({"given": [(0, 4)]}, "given ranges"),
        ({"row_starts": [6]}, "row starts"),
        ({"row_starts": [8, 8]}, "row starts"),
        ({"turn_advantages": np.zeros(4, np.float32)}, "4 advantages of 5 target tokens"),
        ({"generator_logprobs": np.zeros(6, np.float32)}, "logprobs and versions of 5 target"),
    ],
)
def test_a_conversation_that_contradicts_itself_is_found(change: dict, message: str) -> None:
    assert message in msgspec.structs.replace(conversation(), **change).find_fault()
