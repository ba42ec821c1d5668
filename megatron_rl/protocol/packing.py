"""Packs sequences into microbatches and deals these to data-parallel ranks. Pure.

Used by the rollout queue and by supervised fine-tuning. Works on lengths (prompt + completion
tokens) and returns indices, so that it serves any kind of sequence.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost

LOOKAHEAD = 256
EXCHANGES = 64
"""Of microbatches between ranks, at most."""
Microbatch = list[int]
"""Indices of the sequences packed together."""


def pack(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Few microbatches within the budget, from long sequences to short ones.

    A sequence longer than the budget gets a microbatch of its own. First-fit decreasing is within
    a percent of the least count that can be; where it misses that, filling one microbatch after
    the other is tried as well, and the fewer are taken: on eight ranks one microbatch too many
    can cost eight.
    """
    microbatches = first_fit_decreasing(lengths, budget_tokens)
    least = math.ceil(sum(min(length, budget_tokens) for length in lengths) / budget_tokens)
    if len(microbatches) == least:
        return microbatches
    return min(microbatches, _fill_one_by_one(lengths, budget_tokens), key=len)


def first_fit_decreasing(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Longest sequence first, into the first microbatch with room; equal ones keep their order.

    Source: Magistral (arXiv 2506.10910), "greedy collation".
    """
    microbatches: list[Microbatch] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        for place, free in enumerate(room):
            if length <= free:
                microbatches[place].append(index)
                room[place] -= length
                break
        else:
            microbatches.append([index])
            room.append(budget_tokens - length)
    return microbatches


def _fill_one_by_one(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Start with the longest sequence left; add the one that alone or with another fills best.

    Only the LOOKAHEAD longest that fit are tried as that one.
    """
    left = sorted((length, index) for index, length in enumerate(lengths))
    microbatches: list[Microbatch] = []
    while left:
        length, index = left.pop()
        microbatches.append([index])
        room = budget_tokens - length
        while (fitting := bisect_right(left, (room, math.inf))) > 0:
            place = _best_of_pair(left, fitting, room)
            length, index = left.pop(place)
            microbatches[-1].append(index)
            room -= length
    return microbatches


def _best_of_pair(left: list[tuple[int, int]], fitting: int, room: int) -> int:
    """Place of the longer of the two that fill `room` best; the first `fitting` of `left` fit."""
    best_place, best_filled = fitting - 1, 0
    for place in range(fitting - 1, max(-1, fitting - 1 - LOOKAHEAD), -1):
        length = left[place][0]
        partner = bisect_right(left, (room - length, math.inf), 0, place) - 1
        filled = length + (left[partner][0] if partner >= 0 else 0)
        if filled > best_filled:
            best_place, best_filled = place, filled
        if filled == room:
            break
    return best_place


def deal(
    lengths: list[int], *, budget_tokens: int, dp_size: int, cost: SequenceCost = TOKENS
) -> list[list[Microbatch]]:
    """Microbatches of each data-parallel rank: [dp_size][same count on every rank].

    Every rank runs as many microbatches as the others, so those missing to a multiple of dp_size
    are won by halving the dearest; where nothing is left to halve they are empty. Each microbatch,
    dearest first, goes to the rank that has the least to do among those with room: then also those
    of one number are alike on all ranks, which exchange tokens of experts.
    """
    microbatches = pack(lengths, budget_tokens)
    costs = [cost.of(length) for length in lengths]
    while len(microbatches) % dp_size:
        microbatches += _halve_dearest(microbatches, costs)

    def cost_of(microbatch: Microbatch) -> int:
        return sum(costs[index] for index in microbatch)

    per_rank = len(microbatches) // dp_size
    ranks: list[list[Microbatch]] = [[] for _ in range(dp_size)]
    rank_costs = [0] * dp_size
    for microbatch in sorted(microbatches, key=cost_of, reverse=True):
        open_ranks = [rank for rank in range(dp_size) if len(ranks[rank]) < per_rank]
        rank = min(open_ranks, key=lambda r: rank_costs[r])
        ranks[rank].append(microbatch)
        rank_costs[rank] += cost_of(microbatch)
    if cost == TOKENS:
        # Packed microbatches are nearly full, so their tokens are even as they are.
        return ranks
    _even_out(ranks, cost_of)
    return [sorted(rank, key=cost_of, reverse=True) for rank in ranks]


def _even_out(ranks: list[list[Microbatch]], cost_of: Callable[[Microbatch], int]) -> None:
    """Exchange microbatches of the dearest rank for cheaper ones, as long as that helps.

    As every rank has equally many, dealing them one by one ends with ranks that have no room.
    """
    costs = [[cost_of(microbatch) for microbatch in rank] for rank in ranks]
    for _ in range(EXCHANGES):
        totals = [sum(of_rank) for of_rank in costs]
        dearest = max(range(len(ranks)), key=lambda r: totals[r])
        # What the dearer of the two would have, and the two places; the least of all.
        best = (totals[dearest], -1, -1, -1)
        for other, of_other in enumerate(costs):
            gap = totals[dearest] - totals[other]
            for place, mine in enumerate(costs[dearest]):
                for at, theirs in enumerate(of_other):
                    if 0 < (less := mine - theirs) < gap:
                        after = max(totals[dearest] - less, totals[other] + less)
                        best = min(best, (after, other, place, at))
        _, other, place, at = best
        if other < 0:
            return
        exchanged: tuple[list[list[Any]], ...] = (ranks, costs)
        for of_ranks in exchanged:
            one, two = of_ranks[dearest], of_ranks[other]
            one[place], two[at] = two[at], one[place]


def _halve_dearest(microbatches: list[Microbatch], costs: list[int]) -> list[Microbatch]:
    """Remove half of the dearest divisible microbatch and return it as one; else an empty one."""
    divisible = [microbatch for microbatch in microbatches if len(microbatch) > 1]
    if not divisible:
        return [[]]
    dearest = max(divisible, key=lambda microbatch: sum(costs[i] for i in microbatch))
    halves: tuple[Microbatch, Microbatch] = ([], [])
    for index in sorted(dearest, key=lambda i: -costs[i]):
        min(halves, key=lambda half: sum(costs[i] for i in half)).append(index)
    dearest[:] = halves[0]
    return [halves[1]]
