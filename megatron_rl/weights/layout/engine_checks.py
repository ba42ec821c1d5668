"""Checks that slices describe the parameters of an engine. Used by engines and their tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_rl.weights.layout.slices import Slice, unmatched_text

if TYPE_CHECKING:
    from torch import Tensor

_PADDED_VOCAB = ("embed_tokens.weight", "lm_head.weight")
_PADDED_FFN = (
    "gate_up_proj.weight",
    "down_proj.weight",
    "experts.w13_weight",
    "experts.w13_weight_bias",
    "experts.w2_weight",
)
"""Name endings of parameters that may hold padding, which no slice covers."""


def check_slices(
    slices: Iterable[Slice], parameters: Mapping[str, Tensor], *, may_pad_ffn: bool = False
) -> None:
    """Raise ValueError, naming the parameters, unless the slices describe the parameters.

    They must not overlap or reach outside, and must cover each parameter: wholly, or in part where
    it may hold padding, of the vocabulary or, with `may_pad_ffn`, of MLP units. A parameter that
    shares a covered one's memory needs no slice.
    """
    padded = _PADDED_VOCAB + (_PADDED_FFN if may_pad_ffn else ())
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for part in slices:
        by_name[part.local].append(part)
    # A tied output matrix is a second name of the embedding's memory. A tensor on torch's device
    # "meta" stands for one that is quantised: it has no memory, and all of them the address 0.
    covered = {parameters[name].data_ptr() for name in by_name if name in parameters} - {0}
    left = [
        name
        for name, parameter in parameters.items()
        if name not in by_name and parameter.data_ptr() not in covered
    ]
    if text := unmatched_text(by_name.keys() - parameters.keys(), left):
        raise ValueError(text)
    for name, parts in by_name.items():
        missing = parameters[name].numel() - _covered(name, parts, parameters[name])
        if missing and not name.endswith(padded):
            raise ValueError(f"{name}: {missing} of its elements are in no slice")


def _covered(name: str, parts: list[Slice], parameter: Tensor) -> int:
    """Elements of the parameter in the slices. Raises ValueError if they overlap or do not fit."""
    dims = tuple(parameter.shape)
    if not dims or not parameter.is_contiguous():
        raise ValueError(f"{name}: {dims} with strides {parameter.stride()} is no plain matrix")
    columns = dims[-1] if len(dims) > 1 else 1
    rows = parameter.numel() // columns
    # Going down the rows, a part can overlap only those that still reach below its first row.
    open_parts: list[Slice] = []
    for part in sorted(parts, key=lambda part: part.local_row):
        bottom, right = part.local_row + part.rows, part.local_column + part.columns
        if min(part.local_row, part.local_column) < 0 or bottom > rows or right > columns:
            raise ValueError(f"{name}: {part} reaches outside of {dims}")
        open_parts = [one for one in open_parts if one.local_row + one.rows > part.local_row]
        for other in open_parts:
            if (
                part.local_column < other.local_column + other.columns
                and other.local_column < right
            ):
                raise ValueError(f"{name}: {part} overlaps {other}")
        open_parts.append(part)
    return sum(part.size for part in parts)
