import random

from megatron_rl.protocol.packing import deal, pack


def slow_first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """The textbook text of it, bin sums computed afresh."""
    bins: list[list[int]] = []
    remaining = list(range(len(lengths)))
    while remaining:
        longest = max(remaining, key=lambda i: (lengths[i], -i))
        remaining.remove(longest)
        fitting = [b for b in bins if sum(lengths[i] for i in b) + lengths[longest] <= budget]
        if fitting:
            fitting[0].append(longest)
        else:
            bins.append([longest])
    return bins


def test_packing_matches_hand_worked_example() -> None:
    # Longest first: 7 opens A, 5 opens B, 4 fits B (9), 3 fits A (10), 2 opens C.
    assert pack([3, 7, 2, 5, 4], 10) == [[1, 0], [3, 4], [2]]


def test_packing_equals_the_slow_first_fit_on_random_lengths() -> None:
    chance = random.Random(0)
    for _ in range(100):
        lengths = [chance.randint(1, 60) for _ in range(chance.randint(0, 40))]
        assert pack(lengths, 50) == slow_first_fit_decreasing(lengths, 50)


def test_sequence_longer_than_the_budget_gets_its_own_microbatch() -> None:
    assert pack([30, 4, 4], 10) == [[0], [1, 2]]


def test_dealing_loses_and_duplicates_nothing_and_keeps_budget_and_counts() -> None:
    chance = random.Random(1)
    for _ in range(300):
        lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 50))]
        dp_size, budget = chance.randint(1, 5), chance.randint(20, 100)
        ranks = deal(lengths, budget_tokens=budget, dp_size=dp_size)
        flat = [i for rank in ranks for microbatch in rank for i in microbatch]
        assert sorted(flat) == list(range(len(lengths)))
        assert len(ranks) == dp_size and len({len(rank) for rank in ranks}) == 1
        for microbatch in (m for rank in ranks for m in rank):
            assert sum(lengths[i] for i in microbatch) <= budget or len(microbatch) == 1
        assert ranks == deal(lengths, budget_tokens=budget, dp_size=dp_size)


def test_one_microbatch_is_halved_for_two_ranks() -> None:
    # 8 + (3 + 3) + 2: halves by descending length: 8 | 3 3 2.
    assert deal([3, 8, 3, 2], budget_tokens=100, dp_size=2) == [[[1]], [[0, 2, 3]]] or deal(
        [3, 8, 3, 2], budget_tokens=100, dp_size=2
    ) == [[[0, 2, 3]], [[1]]]


def test_rank_without_sequences_gets_an_empty_microbatch() -> None:
    assert deal([5], budget_tokens=10, dp_size=2) == [[[0]], [[]]]


def test_tokens_are_balanced_over_ranks() -> None:
    chance = random.Random(2)
    lengths = [chance.randint(10, 100) for _ in range(256)]
    ranks = deal(lengths, budget_tokens=400, dp_size=4)
    tokens = [sum(lengths[i] for m in rank for i in m) for rank in ranks]
    assert max(tokens) - min(tokens) <= 400
