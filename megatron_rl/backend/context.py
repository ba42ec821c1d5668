"""Which positions of packed sequences a context rank holds.

Used by trainer ranks. A sequence is cut into 2 * ranks chunks of equal length, and rank r holds
chunks r and 2 * ranks - 1 - r: an early and a late one, so that all ranks attend to equally many
keys. TransformerEngine's ring and Megatron's rotary angles expect this order.
"""

import torch
from torch import Tensor


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Numbers of the two chunks of each sequence that the rank holds, in its order."""
    return rank, 2 * ranks - 1 - rank


def shard_positions(bounds: Tensor, rank: int, ranks: int) -> Tensor:
    """The rank's positions, in its order: [positions / ranks] int64 on the device of `bounds`.

    bounds: [sequences + 1], where each sequence starts, and the end; 2 * ranks divides each length.
    """
    # Each sequence by itself, as attention does not cross sequences: all ranks share each equally.
    edges = bounds.tolist()
    parts = []
    for start, end in zip(edges, edges[1:], strict=False):
        length, rest = divmod(end - start, 2 * ranks)
        assert not rest, f"{ranks} context ranks cannot share {end - start} positions"
        # The early chunk comes first: the rank's positions of a sequence stay in ascending order.
        for chunk in own_chunks(rank, ranks):
            first = start + chunk * length
            parts.append(torch.arange(first, first + length, device=bounds.device))
    return torch.cat(parts)


def gathered_places(bounds: Tensor, count: int, ranks: int) -> Tensor:
    """Where each position of whole sequences lies in the tensors of all ranks, one after another.

    Without waiting for the device. [count] int64; count: positions of all ranks.
    """
    rows = torch.arange(count, device=bounds.device)
    starts = bounds.long()
    sequences = torch.searchsorted(starts, rows, right=True) - 1
    inside = rows - starts[sequences]
    length = (starts[sequences + 1] - starts[sequences]) // (2 * ranks)
    chunk = inside // length
    is_early = chunk < ranks
    owner = torch.where(is_early, chunk, own_chunks(0, ranks)[1] - chunk)
    place = starts[sequences] // ranks + inside % length + torch.where(is_early, 0, length)
    return owner * (count // ranks) + place


def positions_within(bounds: Tensor, count: int, rank: int, ranks: int) -> Tensor:
    """The position within its sequence of each of the rank's `count` rows, in its order.

    As `shard_positions`, without waiting for the device. [count] int64.
    """
    rows = torch.arange(count, device=bounds.device)
    starts = bounds.long()
    sequences = torch.searchsorted(starts // ranks, rows, right=True) - 1
    inside = rows - starts[sequences] // ranks
    chunk = (starts[sequences + 1] - starts[sequences]) // (2 * ranks)
    # The late chunk follows the early one.
    skipped = torch.where(inside < chunk, rank, own_chunks(rank, ranks)[1] - 1)
    return inside + skipped * chunk
