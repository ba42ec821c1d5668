"""Slices: parts of Hugging Face tensors at places of a rank's parameters.

Shared by trainer ranks and engines; needs only torch. Every tensor is seen as a matrix: a vector
[n] as [n, 1], a fused expert tensor [experts, rows, columns] as [experts * rows, columns]. Ranks
that describe their parameters by slices can exchange weights without other knowledge.

A layout says how tensor ranks divide one parameter: the pieces of one rank. The ranks' pieces
together cover every tensor; rows that only pad the vocabulary belong to no piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from megatron_rl.weights.layout.shape import ModelShape


@dataclass(frozen=True)
class Share:
    """A rank and the number of ranks."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """This rank's part of `count` equal rows."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


class Piece(NamedTuple):
    """`hf[source][row : row + rows, column : column + columns]`, at a place of the parameter."""

    source: int
    row: int
    column: int
    rows: int
    columns: int
    local_row: int
    local_column: int


Layout = Callable[[Sequence[tuple[int, int]], Share, ModelShape], list[Piece]]
"""(rows and columns of each HF tensor, the rank, the model) -> the rank's pieces."""


def whole(sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape) -> list[Piece]:
    """Every rank holds all of the one tensor."""
    [(rows, columns)] = sizes
    return [Piece(0, 0, 0, rows, columns, 0, 0)]


def by_heads(sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape) -> list[Piece]:
    """Each rank holds the rows of its query heads of the one tensor."""
    [(rows, columns)] = sizes
    width = rows // shape.heads
    part = share.of(shape.heads)
    return [Piece(0, part.start * width, 0, len(part) * width, columns, 0, 0)]


def by_normed_heads(
    sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape
) -> list[Piece]:
    """Each rank holds its heads' rows of a norm of all heads; a norm of each head is whole."""
    [(rows, columns)] = sizes
    part = share.of(rows) if shape.norms_all_heads else range(rows)
    return [Piece(0, part.start, 0, len(part), columns, 0, 0)]


def by_columns(sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape) -> list[Piece]:
    """Each rank holds equally many columns of the one tensor."""
    [(rows, columns)] = sizes
    part = share.of(columns)
    return [Piece(0, 0, part.start, rows, len(part), 0, 0)]


def by_vocabulary(sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape) -> list[Piece]:
    """Each rank holds equally many rows of the padded vocabulary; the last ones may be padding."""
    [(rows, columns)] = sizes
    part = share.of(shape.padded_vocab(share.size))
    real = min(part.stop, rows) - part.start
    return [Piece(0, part.start, 0, real, columns, 0, 0)] if real > 0 else []


def gate_then_up(sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape) -> list[Piece]:
    """Each rank holds its rows of the gate projection, then the same rows of the up projection."""
    (rows, columns), _ = sizes
    part = share.of(rows)
    return [
        Piece(source, part.start, 0, len(part), columns, source * len(part), 0)
        for source in range(2)
    ]


def by_query_groups(
    sizes: Sequence[tuple[int, int]], share: Share, shape: ModelShape
) -> list[Piece]:
    """For each key-value group of the rank its queries, then its key, then its value."""
    widths = [rows // shape.kv_heads for rows, _ in sizes]
    pieces = []
    local_row = 0
    for group in share.of(shape.kv_heads):
        for source, (width, (_, columns)) in enumerate(zip(widths, sizes, strict=True)):
            pieces.append(Piece(source, group * width, 0, width, columns, local_row, 0))
            local_row += width
    return pieces


class Slice(NamedTuple):
    """`hf[row : row + rows, column : column + columns]` lies in a parameter at a place."""

    hf: str
    """Name of the Hugging Face tensor."""
    row: int
    column: int
    rows: int
    columns: int
    local: str
    """Name of the rank's parameter."""
    local_row: int
    local_column: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns


def as_matrix(tensor: Tensor) -> Tensor:
    """The tensor as a matrix that shares its memory; raises if it cannot."""
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])


def local_part(parameters: dict[str, Tensor], part: Slice) -> Tensor:
    """The part of the rank's parameters in a slice: [rows, columns], sharing their memory."""
    return as_matrix(parameters[part.local])[
        part.local_row : part.local_row + part.rows,
        part.local_column : part.local_column + part.columns,
    ]


_SHOWN = 5


def unmatched_text(not_taken: Collection[str], not_covered: Collection[str]) -> str:
    """Names that are sent and that nobody takes, and names of what gets nothing; "" for none."""
    lists = (
        ("names that the engine does not take", not_taken),
        ("parameters that nothing covers", not_covered),
    )
    return "; ".join(f"{len(names)} {what}: {shown(names)}" for what, names in lists if names)


def shown(names: Collection[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(sorted(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
