"""Packs sequences into microbatches and deals these to data-parallel ranks. Pure.

Used by the rollout queue and by supervised fine-tuning. Works on lengths (prompt + completion
tokens) and returns indices, so that it serves any kind of sequence.
"""

Microbatch = list[int]
"""Indices of the sequences packed together."""


def pack(lengths: list[int], budget_tokens: int) -> list[Microbatch]:
    """Microbatches within the budget: first-fit decreasing, longest sequence first.

    A sequence longer than the budget gets a microbatch of its own. Equal lengths keep their order.
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
