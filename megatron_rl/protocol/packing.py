"""Packs sequences into microbatches and deals these to data-parallel ranks. Pure.

Used by the rollout queue and by supervised fine-tuning. Works on lengths (prompt + completion
tokens) and returns indices, so that it serves any kind of sequence.
"""

import math
from collections.abc import Callable

import numpy as np

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
    # [microbatches] room of each, then of those that are not begun yet.
    room = np.full(len(lengths), budget_tokens, np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length, begun = lengths[index], len(microbatches)
        fits = room[:begun] >= length
        place = int(fits.argmax()) if begun else 0
        if not begun or not fits[place]:
            place = begun
            microbatches.append([])
        microbatches[place].append(index)
        room[place] -= length
    return microbatches


def _fill_one_by_one(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Start with the longest sequence left; add the one that alone or with another fills best.

    Only the LOOKAHEAD longest that fit are tried as that one.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    # [sequences left] ascending.
    left = np.array([lengths[i] for i in order], np.int64)
    microbatches: list[Microbatch] = []
    while order:
        microbatches.append([order.pop()])
        room, left = budget_tokens - int(left[-1]), left[:-1]
        while (fitting := int(np.searchsorted(left, room, side="right"))) > 0:
            place = _best_of_pair(left[:fitting], room)
            microbatches[-1].append(order.pop(place))
            room -= int(left[place])
            left = np.delete(left, place)
    return microbatches


def _best_of_pair(fitting: np.ndarray, room: int) -> int:
    """Place of the longer of the two that fill `room` best; fitting: [sequences] ascending."""
    places = np.arange(len(fitting) - 1, max(-1, len(fitting) - 1 - LOOKAHEAD), -1)
    longer = fitting[places]
    # The longest partner that still fits, and that is not longer.
    partners = np.minimum(np.searchsorted(fitting, room - longer, side="right"), places) - 1
    filled = longer + np.where(partners >= 0, fitting[partners], 0)
    return int(places[filled.argmax()])


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
    # [ranks, microbatches of each]
    costs = np.array([[cost_of(microbatch) for microbatch in rank] for rank in ranks], np.int64)
    for _ in range(EXCHANGES):
        totals = costs.sum(axis=1)
        dearest = int(totals.argmax())
        # [microbatches of the dearest, ranks, microbatches]: what an exchange takes from it.
        less = costs[dearest][:, None, None] - costs[None]
        gap = (totals[dearest] - totals)[None, :, None]
        after = np.maximum(totals[dearest] - less, totals[None, :, None] + less)
        after = np.where((less > 0) & (less < gap), after, totals[dearest])
        if int(after.min(initial=totals[dearest])) == totals[dearest]:
            return
        # The least of all; of equals that of the first rank, then of the first places.
        by_rank = after.swapaxes(0, 1)
        other, place, at = (int(i) for i in np.unravel_index(by_rank.argmin(), by_rank.shape))
        ranks[dearest][place], ranks[other][at] = ranks[other][at], ranks[dearest][place]
        costs[dearest, place], costs[other, at] = costs[other, at], costs[dearest, place]


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
