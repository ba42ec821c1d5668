"""Products with weights that were reordered once, as oneDNN's kernels read them.

Imported by SGLang's scheduler processes on the CPU. torch's own linear layer reorders the weights
at every call, which at the few rows of a decode step costs as much as the product.

Reordered copies are made when a layer runs first, and are void after every update of weights:
parameters change in place, some of them unseen by torch's version counters (`param.data`, gloo), so
whatever may write them is wrapped.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from seeded_draws import are_wanted
from torch.nn.functional import linear, pad

SMALLEST_ELEMENTS = 1 << 17
"""Below, the call itself costs more than reordering does."""
FEWEST_ROWS_FLOAT32 = 4
CHECKED_ROWS = (1, 2, 4, 5, 16, 33, 257)
"""Numbers of rows that a layer is tried with before its first product under `are_wanted`."""
BLOCK_ROWS = 16
PLANNED_ROWS = 64
"""For how many rows oneDNN chooses the order; it fits others too."""
WRITERS = (
    "update_weights_from_disk",
    "begin_weight_update",
    "end_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Methods of SGLang's WeightUpdater; everything that writes weights goes through one of them."""


class Copies:
    """Counts updates of weights: a copy holds only as long as the count that it was made under."""

    def __init__(self) -> None:
        self.updates = 0
        # Until the writers are wrapped nobody would count, so nothing is kept.
        self.is_watched = False

    @contextlib.contextmanager
    def voided(self) -> Iterator[None]:
        """Void all copies before and after weights are written, also if that fails midway."""
        self.updates += 1
        try:
            yield
        finally:
            self.updates += 1


COPIES = Copies()


def is_worthwhile(weight: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether a product of `rows` with `weight` shall use a reordered copy."""
    if rows.dim() != 2 or weight.dtype != rows.dtype or not torch.backends.mkldnn.is_available():
        return False
    # MKL's kernels round a row by how many there are where oneDNN's do not.
    if weight.numel() < SMALLEST_ELEMENTS and not are_wanted():
        return False
    if weight.dtype == torch.bfloat16:
        return has_bfloat16()
    return weight.dtype == torch.float32 and rows.shape[0] >= FEWEST_ROWS_FLOAT32


@functools.cache
def has_bfloat16() -> bool:
    """Whether oneDNN has kernels for bfloat16 on this processor."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiply(
    layer: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """rows @ layer.weight.T + bias; rows: [rows, inputs].

    With `are_wanted` each row rounds as among any other rows; RuntimeError where it does not.
    """
    if not are_wanted() or rows.dim() != 2:
        return _product(layer, rows, bias)
    if "_block" not in layer.__dict__:
        layer.__dict__["_block"] = choose_block(layer)
    return _alike(layer, rows, bias, layer.__dict__["_block"])


def choose_block(layer: torch.nn.Module) -> int:
    """How many rows to multiply at a time so that each rounds alike among any; 0: all at once.

    RuntimeError if this CPU rounds a row by where it stands among them.
    """
    weight = layer.weight
    drawn = torch.randn(320, weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows = drawn.to(weight.dtype)
    # With AMX, oneDNN takes another kernel for many rows of bfloat16 than for few.
    for block in (0, BLOCK_ROWS):
        whole = _alike(layer, rows, None, block)
        if all(
            torch.equal(_alike(layer, rows[first:last], None, block), whole[first:last])
            for count in CHECKED_ROWS
            for first, last in ((0, count), (19, 19 + count))
        ):
            return block
    raise RuntimeError(
        "expert.generator.deterministic=true: on this CPU a row of a product with a "
        f"{weight.dtype} matrix of {list(weight.shape)} rounds by its place among {BLOCK_ROWS}; "
        'set generator.engine="hf", or expert.generator.deterministic=false'
    )


def _alike(
    layer: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor | None, block: int
) -> torch.Tensor:
    """The product, `block` rows at a time, zeros after the last ones."""
    count = rows.shape[0]
    if count == 0:
        return _product(layer, rows, bias)
    if not block:
        return _product(layer, padded(rows, FEWEST_ROWS_FLOAT32), bias)[:count]
    blocks = padded(rows, -(-count // block) * block).split(block)
    return torch.cat([_product(layer, part, bias) for part in blocks])[:count]


def _product(layer: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = layer.weight
    if not COPIES.is_watched or not is_worthwhile(weight, rows):
        return linear(rows, weight, bias)
    updates, address, copy = layer.__dict__.get("_reordered", (-1, 0, None))
    if updates != COPIES.updates or address != weight.data_ptr():
        # The older copy goes first: two at once would cost memory.
        layer.__dict__["_reordered"] = copy = None
        copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PLANNED_ROWS)
        layer.__dict__["_reordered"] = (COPIES.updates, weight.data_ptr(), copy)
    return torch.ops.mkldnn._linear_pointwise(rows, copy, bias, "none", [], "")


def padded(rows: torch.Tensor, fewest: int = FEWEST_ROWS_FLOAT32) -> torch.Tensor:
    """Fewer than `fewest` rows, [rows, inputs], with zeros after them.

    Products of fewer than four rows add in another order, with torch's kernels as with oneDNN's.
    """
    return pad(rows, (0, 0, 0, max(0, fewest - rows.shape[0]))).contiguous()


def install(module: ModuleType) -> None:
    """Let the linear layers of `sglang.srt.layers.quantization.unquant` use copies."""

    def apply(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multiply(layer, x, bias)

    if torch.backends.mkldnn.is_available() or are_wanted():
        module.UnquantizedLinearMethod.apply = apply


def install_updates(module: ModuleType) -> None:
    """Watch everything in SGLang's weight updater that writes weights."""
    updater = module.WeightUpdater
    for name in WRITERS:
        setattr(updater, name, _voiding(getattr(updater, name)))
    COPIES.is_watched = True


def _voiding(write: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        with COPIES.voided():
            return write(*args, **options)

    return wrapped
