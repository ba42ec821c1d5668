"""Packs sequences into microbatches and deals them to data-parallel ranks. Pure.

Used by the rollout queue and by supervised fine-tuning. Takes lengths (prompt + completion tokens)
and returns indices.
"""

import math
from collections.abc import Callable

import numpy as np

from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost

LOOKAHEAD = 256
EXCHANGES = 64
"""Maximum number of exchanges of microbatches between ranks."""
Microbatch = list[int]
"""Indices of the sequences packed together."""


def pack(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Pack into few microbatches within the budget; a longer sequence gets its own microbatch.

    First-fit decreasing is within a percent of the minimum. If it misses the minimum, filling one
    microbatch after the other is tried too: on eight ranks one extra microbatch can cost eight.
    """
    microbatches = first_fit_decreasing(lengths, budget_tokens)
    least = math.ceil(sum(min(length, budget_tokens) for length in lengths) / budget_tokens)
    if len(microbatches) == least:
        return microbatches
    return min(microbatches, _fill_one_by_one(lengths, budget_tokens), key=len)


def first_fit_decreasing(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Put the longest sequence first into the first microbatch with room; a stable order.

    Source: Magistral (arXiv 2506.10910), "greedy collation".
    """
    microbatches: list[Microbatch] = []
    # [sequences] room of each microbatch; the rest are empty microbatches.
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
    """Start with the longest sequence; add the one that alone or with a partner fills best.

    Tries only the LOOKAHEAD longest sequences that fit.
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
    """Index of the longer of two sequences that fill `room` best; fitting: ascending lengths."""
    places = np.arange(len(fitting) - 1, max(-1, len(fitting) - 1 - LOOKAHEAD), -1)
    longer = fitting[places]
    # The longest partner that still fits and is not longer.
    partners = np.minimum(np.searchsorted(fitting, room - longer, side="right"), places) - 1
    filled = longer + np.where(partners >= 0, fitting[partners], 0)
    return int(places[filled.argmax()])


def deal(
    lengths: list[int], *, budget_tokens: int, dp_size: int, cost: SequenceCost = TOKENS
) -> list[list[Microbatch]]:
    """Microbatches of each data-parallel rank: [dp_size][same count on every rank].

    All ranks run the same number of microbatches, so the costliest are halved until the count is a
    multiple of dp_size; if none can be halved, empty ones are added. Each microbatch, costliest
    first, goes to the rank with room and the least cost. So microbatches with the same number have
    similar costs on all ranks, which exchange expert tokens.
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
        # Packed microbatches are nearly full, so their tokens are already even.
        return ranks
    _even_out(ranks, cost_of)
    return [sorted(rank, key=cost_of, reverse=True) for rank in ranks]


def _even_out(ranks: list[list[Microbatch]], cost_of: Callable[[Microbatch], int]) -> None:
    """Exchange microbatches of the costliest rank for cheaper ones while that helps."""
    # [ranks, microbatches of each]
    costs = np.array([[cost_of(microbatch) for microbatch in rank] for rank in ranks], np.int64)
    for _ in range(EXCHANGES):
        totals = costs.sum(axis=1)
        dearest = int(totals.argmax())
        # [microbatches of the costliest rank, ranks, microbatches]: savings of an exchange.
        less = costs[dearest][:, None, None] - costs[None]
        gap = (totals[dearest] - totals)[None, :, None]
        after = np.maximum(totals[dearest] - less, totals[None, :, None] + less)
        after = np.where((less > 0) & (less < gap), after, totals[dearest])
        if int(after.min(initial=totals[dearest])) == totals[dearest]:
            return
        # The minimum; ties go to the first rank, then to the first microbatches.
        by_rank = after.swapaxes(0, 1)
        other, place, at = (int(i) for i in np.unravel_index(by_rank.argmin(), by_rank.shape))
        ranks[dearest][place], ranks[other][at] = ranks[other][at], ranks[dearest][place]
        costs[dearest, place], costs[other, at] = costs[other, at], costs[dearest, place]


def _halve_dearest(microbatches: list[Microbatch], costs: list[int]) -> list[Microbatch]:
    """Split off half of the costliest divisible microbatch; if none, return an empty one."""
    divisible = [microbatch for microbatch in microbatches if len(microbatch) > 1]
    if not divisible:
        return [[]]
    dearest = max(divisible, key=lambda microbatch: sum(costs[i] for i in microbatch))
    halves: tuple[Microbatch, Microbatch] = ([], [])
    for index in sorted(dearest, key=lambda i: -costs[i]):
        min(halves, key=lambda half: sum(costs[i] for i in half)).append(index)
    dearest[:] = halves[0]
    return [halves[1]]
