"""Packs sequences into microbatches and deals these to data-parallel ranks. Pure.

Used by the rollout queue and by supervised fine-tuning. Works on lengths (prompt + completion
tokens) and returns indices, so that it serves any kind of sequence.
"""

import math
from bisect import bisect_right

LOOKAHEAD = 256
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


def deal(lengths: list[int], *, budget_tokens: int, dp_size: int) -> list[list[Microbatch]]:
    """Microbatches of each data-parallel rank: [dp_size][same count on every rank].

    Every rank runs as many microbatches as the others, so those missing to a multiple of dp_size
    are won by halving the largest; where nothing is left to halve they are empty. Each microbatch,
    largest first, goes to the rank with the fewest tokens among those with room.
    """
    microbatches = pack(lengths, budget_tokens)
    while len(microbatches) % dp_size:
        microbatches += _halve_largest(microbatches, lengths)

    def tokens_of(microbatch: Microbatch) -> int:
        return sum(lengths[index] for index in microbatch)

    per_rank = len(microbatches) // dp_size
    ranks: list[list[Microbatch]] = [[] for _ in range(dp_size)]
    rank_tokens = [0] * dp_size
    for microbatch in sorted(microbatches, key=tokens_of, reverse=True):
        open_ranks = [rank for rank in range(dp_size) if len(ranks[rank]) < per_rank]
        rank = min(open_ranks, key=lambda r: rank_tokens[r])
        ranks[rank].append(microbatch)
        rank_tokens[rank] += tokens_of(microbatch)
    return ranks


def _halve_largest(microbatches: list[Microbatch], lengths: list[int]) -> list[Microbatch]:
    """Remove half of the largest divisible microbatch and return it as one; else an empty one."""
    divisible = [microbatch for microbatch in microbatches if len(microbatch) > 1]
    if not divisible:
        return [[]]
    largest = max(divisible, key=lambda microbatch: sum(lengths[i] for i in microbatch))
    halves: tuple[Microbatch, Microbatch] = ([], [])
    for index in sorted(largest, key=lambda i: -lengths[i]):
        min(halves, key=lambda half: sum(lengths[i] for i in half)).append(index)
    largest[:] = halves[0]
    return [halves[1]]
