"""Which part of a Hugging Face tensor lies where in a rank's parameters.

Shared by trainer ranks and engines; needs torch alone. Every tensor is seen as a matrix: a vector
[n] as [n, 1], a fused expert tensor [experts, rows, columns] as [experts * rows, columns]. Two
ranks that describe their parameters by slices can exchange weights without knowing more of each
other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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
    """The tensor as a matrix that shares its memory; raises where it cannot."""
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])


def local_part(parameters: dict[str, Tensor], part: Slice) -> Tensor:
    """What of the rank's parameters a slice describes: [rows, columns], sharing their memory."""
    return as_matrix(parameters[part.local])[
        part.local_row : part.local_row + part.rows,
        part.local_column : part.local_column + part.columns,
    ]
