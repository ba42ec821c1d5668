"""Loops of an engine rank's forward pass on the CPU, called with torch tensors.

Used by the shims of SGLang. Each function has an obvious counterpart in plain torch operators (see
the tests); `can_run` says whether tensors are such that the loops take them.
"""

import ctypes
import functools
import logging
import math
from dataclasses import dataclass

import torch

from megatron_rl.backend.cpu.kernels import build

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
WIDTH_MULTIPLE = 16
WIDTH_MAX = 8192
SAMPLE_BLOCK = 1024
"""Of `engine_sampling.cpp`."""

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[str, tuple[type, ...]]] = {
    "add_norm": ("engine_layers", (_INT, *[_POINTER] * 4, _LONG, _LONG, _FLOAT)),
    "silu_multiply": ("engine_layers", (_INT, _POINTER, _POINTER, _LONG, _LONG)),
    "rotate": ("engine_layers", (_INT, _POINTER, *[_LONG] * 3, _POINTER, _POINTER, _LONG)),
    "attend": (
        "engine_attention",
        (_INT, _POINTER, _LONG, *[_POINTER] * 4, _LONG, *[_POINTER] * 3, *[_LONG] * 4, _FLOAT),
    ),
    "store": (
        "engine_attention",
        (_INT, _POINTER, _LONG, _POINTER, _LONG, *[_POINTER] * 3, _LONG, _LONG),
    ),
    "sample": ("engine_sampling", (_INT, _POINTER, *[_LONG] * 3, *[_POINTER] * 5)),
}
"""Source and types of the arguments of each function, whose name there begins with engine_."""


@functools.cache
def are_available() -> bool:
    """Whether the loops compile here. If not, the log says so once."""
    try:
        compiled()
    except build.CompilerFailed as error:
        log.warning("SGLang decodes slower on this CPU without loops in C++: %s", error)
        return False
    return True


@functools.cache
def compiled() -> dict[str, ctypes._CFuncPtr]:
    """The functions by name, which take addresses and numbers. Raises build.CompilerFailed."""
    found = {}
    for name, (source, types) in _FUNCTIONS.items():
        found[name] = getattr(build.load(source), f"engine_{name}")
        found[name].argtypes = types
    return found


def can_run(*tensors: torch.Tensor) -> bool:
    """Whether all are dense, of one dtype that the loops know, and their rows of a fitting width.

    Rows may lie apart, the elements of a row may not.
    """
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(
        tensor.dtype == dtype
        and tensor.layout == torch.strided
        and tensor.stride(-1) == 1
        and tensor.shape[-1] % WIDTH_MULTIPLE == 0
        for tensor in tensors
    )


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """RMS norm of x + residual times weight; `residual` becomes the sum.

    x, residual: [rows, width], contiguous; the sum and the norm are computed in float32.
    """
    out = torch.empty_like(x)
    compiled()["add_norm"](
        DTYPES[x.dtype],
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        epsilon,
    )
    return out


def silu_multiply(x: torch.Tensor) -> torch.Tensor:
    """[rows, width] silu(gate) * up of x, [rows, 2 * width] contiguous: gates, then ups."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype)
    compiled()["silu_multiply"](DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), rows, width)
    return out


def rotate(x: torch.Tensor, size: int, table: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotary embedding in place; the first half of a head turns against the second.

    x: [rows, heads * size], rows may lie apart; table: [positions, size], cosines and then sines;
    positions: [rows] int64. size is even.
    """
    compiled()["rotate"](
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.shape[1] // size,
        size,
        table.data_ptr(),
        positions.data_ptr(),
        x.shape[0],
    )


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write rows into the slots of both pools.

    keys, values: [rows, KV heads, size], rows may lie apart; pools: [slots, KV heads, size];
    slots: [rows] int64.
    """
    compiled()["store"](
        DTYPES[keys.dtype],
        keys.data_ptr(),
        keys.stride(0),
        values.data_ptr(),
        values.stride(0),
        key_pool.data_ptr(),
        value_pool.data_ptr(),
        slots.data_ptr(),
        keys.shape[0],
        keys.shape[1] * keys.shape[2],
    )


@dataclass(frozen=True, slots=True)
class Requests:
    """Where the keys of the requests of one forward pass lie. Made once for all layers."""

    table: torch.Tensor  # [requests of the server, context] int32, slot of each token
    rows: torch.Tensor  # [requests] int64, the row of each in the table
    query_lens: torch.Tensor | None  # [requests] int64; None: one query each
    key_lens: torch.Tensor  # [requests] int64


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    requests: Requests,
    scale: float | None,
) -> None:
    """Write the causal attention of each request's last tokens over its slots into `output`.

    query, output: [tokens, heads, size]; pools: [slots, KV heads, size].
    """
    table, query_lens = requests.table, requests.query_lens
    compiled()["attend"](
        DTYPES[query.dtype],
        query.data_ptr(),
        query.stride(0),
        output.data_ptr(),
        key_pool.data_ptr(),
        value_pool.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        requests.rows.data_ptr(),
        None if query_lens is None else query_lens.data_ptr(),
        requests.key_lens.data_ptr(),
        requests.rows.shape[0],
        query.shape[1],
        key_pool.shape[1],
        query.shape[2],
        scale or 1 / math.sqrt(query.shape[2]),
    )


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row of softmax(logits / temperature): ([rows] int64, [rows] logprobs).

    logits: [rows, vocabulary]; temperatures: [rows] float32; uniforms: [rows] float64 in (0, 1].
    """
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float32)
    blocks = torch.empty(-(-width // SAMPLE_BLOCK), dtype=torch.float64)
    compiled()["sample"](
        DTYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        rows,
        width,
        temperatures.data_ptr(),
        uniforms.data_ptr(),
        blocks.data_ptr(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
    )
    return tokens, logprobs
