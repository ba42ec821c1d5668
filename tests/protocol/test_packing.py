import math
import random
import time

import pytest

from megatron_rl.protocol import packing
from megatron_rl.protocol.packing import EXCHANGES, LOOKAHEAD, deal, first_fit_decreasing, pack
from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost
from tools.bench.packing import magistral_like


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


def fewest(lengths: list[int], budget: int) -> int:
    """Least count of bins, by trying everything."""

    def search(remaining: tuple[int, ...], rooms: tuple[int, ...]) -> int:
        if not remaining:
            return len(rooms)
        length, rest = remaining[0], remaining[1:]
        # A new bin; oversized sequences leave no room in theirs.
        options = [search(rest, (*rooms, max(0, budget - length)))]
        for place in {room: place for place, room in enumerate(rooms)}.values():
            if length <= rooms[place]:
                grown = (*rooms[:place], rooms[place] - length, *rooms[place + 1 :])
                options.append(search(rest, grown))
        return min(options)

    return search(tuple(sorted(lengths, reverse=True)), ())


def test_first_fit_matches_hand_worked_example() -> None:
    # Longest first: 7 opens A, 5 opens B, 4 fits B (9), 3 fits A (10), 2 opens C.
    assert first_fit_decreasing([3, 7, 2, 5, 4], 10) == [[1, 0], [3, 4], [2]]


def test_first_fit_equals_the_slow_one_on_random_lengths() -> None:
    chance = random.Random(0)
    for _ in range(100):
        lengths = [chance.randint(1, 60) for _ in range(chance.randint(0, 40))]
        assert first_fit_decreasing(lengths, 50) == slow_first_fit_decreasing(lengths, 50)


def test_packing_finds_what_first_fit_misses() -> None:
    # First fit puts 4 + 4, 3 + 3 + 3, 3; two times 4 + 3 + 3 is enough.
    assert len(first_fit_decreasing([4, 4, 3, 3, 3, 3], 10)) == 3
    microbatches = pack([4, 4, 3, 3, 3, 3], 10)
    assert [sorted(m) for m in microbatches] == [[1, 4, 5], [0, 2, 3]]


def test_packing_is_between_the_fewest_and_first_fit() -> None:
    chance = random.Random(3)
    for _ in range(150):
        lengths = [chance.randint(1, 25) for _ in range(chance.randint(0, 8))]
        count, greedy = len(pack(lengths, 20)), len(first_fit_decreasing(lengths, 20))
        assert fewest(lengths, 20) <= count <= greedy


def test_padding_on_magistral_like_lengths_is_below_one_percent() -> None:
    lengths = [sequence.total for sequence in magistral_like(2048, seed=9)]
    microbatches = pack(lengths, 40_960)
    assert sorted(i for microbatch in microbatches for i in microbatch) == list(range(2048))
    assert max(sum(lengths[i] for i in microbatch) for microbatch in microbatches) <= 40_960
    assert sum(lengths) / (40_960 * len(microbatches)) >= 0.99
    assert len(microbatches) <= 1.01 * math.ceil(sum(lengths) / 40_960)


def test_sequence_longer_than_the_budget_gets_its_own_microbatch() -> None:
    assert pack([30, 4, 4], 10) == [[0], [1, 2]]


@pytest.mark.parametrize("cost", [TOKENS, SequenceCost(per_token=1, per_pair=5)])
def test_dealing_loses_and_duplicates_nothing_and_keeps_budget_and_counts(
    cost: SequenceCost,
) -> None:
    chance = random.Random(1)
    for _ in range(300):
        lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 50))]
        dp_size, budget = chance.randint(1, 5), chance.randint(20, 100)
        ranks = deal(lengths, budget_tokens=budget, dp_size=dp_size, cost=cost)
        flat = [i for rank in ranks for microbatch in rank for i in microbatch]
        assert sorted(flat) == list(range(len(lengths)))
        assert len(ranks) == dp_size and len({len(rank) for rank in ranks}) == 1
        for microbatch in (m for rank in ranks for m in rank):
            assert sum(lengths[i] for i in microbatch) <= budget or len(microbatch) == 1
        for rank in ranks:
            costs = [sum(cost.of(lengths[i]) for i in microbatch) for microbatch in rank]
            assert costs == sorted(costs, reverse=True)
        assert ranks == deal(lengths, budget_tokens=budget, dp_size=dp_size, cost=cost)


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


def slow_fill_one_by_one(lengths: list[int], budget: int) -> list[list[int]]:
    """Start with the longest left; add the one that alone or with a shorter one fills best."""
    left = sorted((length, index) for index, length in enumerate(lengths))
    found = []
    while left:
        length, index = left.pop()
        found.append([index])
        room = budget - length
        while fitting := [item for item in left if item[0] <= room]:
            best, best_filled = 0, -1
            for place in range(len(fitting) - 1, max(-1, len(fitting) - 1 - LOOKAHEAD), -1):
                partners = [it[0] for it in fitting[:place] if it[0] <= room - fitting[place][0]]
                filled = fitting[place][0] + max(partners, default=0)
                if filled > best_filled:
                    best, best_filled = place, filled
            length, index = left.pop(best)
            found[-1].append(index)
            room -= length
    return found


def slow_even_out(ranks: list[list[list[int]]], costs: list[int]) -> None:
    def cost_of(microbatch: list[int]) -> int:
        return sum(costs[i] for i in microbatch)

    for _ in range(EXCHANGES):
        totals = [sum(map(cost_of, rank)) for rank in ranks]
        dearest = totals.index(max(totals))
        best = (totals[dearest], -1, -1, -1)
        for other in range(len(ranks)):
            for place, mine in enumerate(ranks[dearest]):
                for at, theirs in enumerate(ranks[other]):
                    less = cost_of(mine) - cost_of(theirs)
                    if 0 < less < totals[dearest] - totals[other]:
                        after = max(totals[dearest] - less, totals[other] + less)
                        best = min(best, (after, other, place, at))
        _, other, place, at = best
        if other < 0:
            return
        one, two = ranks[dearest], ranks[other]
        one[place], two[at] = two[at], one[place]


def test_filling_one_by_one_equals_the_slow_one() -> None:
    chance = random.Random(1)
    for _ in range(60):
        lengths = [chance.randint(1, 70) for _ in range(chance.randint(0, 60))]
        assert packing._fill_one_by_one(lengths, 60) == slow_fill_one_by_one(lengths, 60)


def test_evening_out_equals_the_slow_one() -> None:
    chance = random.Random(2)
    for _ in range(40):
        dp_size, per_rank = chance.randint(1, 5), chance.randint(1, 6)
        costs = [chance.randint(1, 30) ** 2 for _ in range(dp_size * per_rank)]
        ranks = [[[r * per_rank + m] for m in range(per_rank)] for r in range(dp_size)]
        expected = [list(rank) for rank in ranks]
        slow_even_out(expected, costs)
        packing._even_out(ranks, lambda microbatch, costs=costs: costs[microbatch[0]])
        assert ranks == expected


def test_a_large_batch_is_dealt_evenly_while_the_queue_hardly_waits() -> None:
    """8,192 sequences for 16 ranks took 3.6 s; leases stood still meanwhile."""
    lengths = [one.prompt + one.completion for one in magistral_like(8192, seed=3)]
    cost = SequenceCost(per_token=48_000_000_000, per_pair=400_000)
    began = time.process_time()
    ranks = deal(lengths, budget_tokens=max(lengths), dp_size=16, cost=cost)
    assert time.process_time() - began < 2.0
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(8192))
    totals = [sum(cost.of(lengths[i]) for batch in rank for i in batch) for rank in ranks]
    assert max(totals) / (sum(totals) / 16) < 1.001
