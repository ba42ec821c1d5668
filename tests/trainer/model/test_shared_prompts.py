"""Which positions of sequences with common prompts are computed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.trainer.model.collate import collate, share_prompts
from tests.trainer.model.test_collate import make_sequence


def test_a_prompt_is_computed_once_and_no_last_token() -> None:
    sequences = [
        make_sequence([10, 11, 12, 13], 2, 0.5, 0.1),
        make_sequence([10, 11, 20, 21, 22], 2, 1.0, 0.2),
        make_sequence([10, 30], 1, 1.0, 0.2),
    ]
    batch = collate(sequences, shares_prompts=True)
    # 10 11 | 12 | 20 21 | 10: another prompt, of one token, whose only target is its own.
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 10]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert batch.sequence_starts.tolist() == [0, 3, 7, 8] and max(batch.lengths) == 4
    assert batch.folding.positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert batch.folding.rows.tolist() == [0, 1, 2, 5, 6, 7]
    # Position 1 predicts the first token of both completions.
    assert batch.loss_positions.tolist() == [1, 2, 1, 3, 4, 5]
    assert batch.targets.tolist() == [12, 13, 20, 21, 22, 30]
    assert batch.rows == 8


def test_positions_are_padded_by_a_sequence_of_its_own() -> None:
    batch = collate([make_sequence([1, 2, 3, 4], 2, 1.0, 1.0)], multiple=4, shares_prompts=True)
    assert batch.tokens.tolist() == [[1, 2, 3, 0]]
    assert batch.sequence_starts.tolist() == [0, 3, 4]
    assert collate([], multiple=2, shares_prompts=True).tokens.shape == (1, 2)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
            st.lists(st.integers(0, 9), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_target_is_predicted_from_all_that_comes_before_it(
    drawn: list[tuple[list[int], list[int]]],
) -> None:
    sequences = [make_sequence(p + c, len(p), 0.0, 1.0) for p, c in drawn]
    shared = share_prompts(sequences)
    # What a position has seen: the tokens up to any of its rows. All rows must agree on it.
    seen: dict[int, list[int]] = {}
    row = 0
    for length in shared.lengths:
        for end in range(1, length + 1):
            tokens = shared.tokens[row : row + end].tolist()
            assert seen.setdefault(int(shared.positions[row + end - 1]), tokens) == tokens
        row += length
    assert sorted(seen) == list(range(len(shared.rows)))
    predicting = iter(shared.loss_positions.tolist())
    for prompt, completion in drawn:
        for n in range(len(completion)):
            assert seen[next(predicting)] == prompt + completion[:n]
    distinct = {tuple(prompt) for prompt, _ in drawn}
    assert len(shared.rows) == sum(map(len, distinct)) + sum(len(c) - 1 for _, c in drawn)
    assert np.array_equal(shared.positions[shared.rows], np.arange(len(shared.rows)))
