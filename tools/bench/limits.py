"""Upper limits of this machine: `python -m tools.bench.limits [--quick]`.

Other benchmarks import its functions, so that "achieved over limit" compares figures of one run.

gemm_flops_per_s: products of a model's linear layers (layers) and of its output layer (head), by
model, dtype, rows of activations and threads. plain is torch.nn.functional.linear, packed is oneDNN
with weights stored in its blocked order.
read_bytes_per_s: memory read; a footprint like the 135M model in bf16, and a much larger one.
copy_bytes_per_s: memory copied; each byte counts once.
loopback: bytes/s of large messages, and seconds of a round trip of 64 bytes between two processes.

Each figure is the best of several windows, because other work can only slow a window down. All
layers have distinct weights, as in a model, so that weights beyond the caches are read from memory.
Unfair: models also normalise, rotate, attend and sample; fused products (q, k and v in one, gate
and up in one) are assumed; a virtual machine shares caches and memory with others, and a large
cache makes the small footprint look like memory. The last line is one JSON object.
"""

import math
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import zmq
from torch import Tensor

from tools.bench.children import HOST, SMOLLM2, TINY
from tools.bench.measuring import parser, report

WINDOWS = 5
WINDOW_S = 0.05
"""Minimum length of a window: a shorter window times the clock."""
SMALL_BYTES = 270 << 20
LARGE_BYTES = 2 << 30
THREADS = (1, 2)
MESSAGE_BYTES, MESSAGES = 16 << 20, 16
TRIP_BYTES, ROUND_TRIPS = 64, 500
PEER_TIMEOUT_S = 60.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shapes:
    """(outputs, inputs) of each linear layer of a model."""

    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    layers: int

    @property
    def layer_weights(self) -> int:
        return sum(rows * columns for rows, columns in self.layer)

    @property
    def weights(self) -> int:
        """Weights of all products, the output layer included."""
        return self.layers * self.layer_weights + math.prod(self.head)


def shapes_of(sizes: dict[str, int]) -> Shapes:
    """Shapes of a Llama with fused q, k and v, and fused gate and up; sizes: of `llama`."""
    hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head_dim = sizes.get("head_dim", hidden // heads)
    return Shapes(
        layer=(
            ((heads + 2 * kv_heads) * head_dim, hidden),
            (hidden, heads * head_dim),
            (2 * ffn, hidden),
            (hidden, ffn),
        ),
        head=(sizes["vocab_size"], hidden),
        layers=sizes["num_hidden_layers"],
    )


MODELS = {"135M": shapes_of(SMOLLM2), "1.3M": shapes_of(TINY)}


def best_seconds(
    function: Callable[[], object], *, windows: int = WINDOWS, window_s: float = WINDOW_S
) -> float:
    """Seconds of one call in the best of several windows of at least `window_s`."""
    function()
    calls, best = 1, float("inf")
    for _ in range(windows):
        while True:
            started = time.perf_counter()
            for _ in range(calls):
                function()
            seconds = time.perf_counter() - started
            if seconds >= window_s:
                break
            calls = max(calls + 1, int(calls * 1.2 * window_s / max(seconds, 1e-9)))
        best = min(best, seconds / calls)
    return best


Product = Callable[[Tensor], Tensor]


def plain_product(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def packed_product(weight: Tensor, rows: int) -> Product | None:
    """oneDNN's product with a weight in its blocked order; None when this torch has none."""
    operators = torch.ops.mkldnn
    try:
        packed = operators._reorder_linear_weight(weight, rows)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return lambda x: operators._linear_pointwise(x, packed, None, "none", [], "")


@torch.no_grad()
def product_rate(
    shapes: Sequence[tuple[int, int]],
    rows: int,
    dtype: torch.dtype,
    *,
    repeats: int,
    is_packed: bool,
) -> float | None:
    """FLOP/s of products of these shapes, each with `repeats` distinct weights, in torch's threads.

    None when there is no packed product.
    """
    work: list[tuple[Product, Tensor]] = []
    inputs = {columns: torch.randn(rows, columns).to(dtype) for _, columns in shapes}
    for _ in range(repeats):
        for outputs, columns in shapes:
            weight = torch.randn(outputs, columns, dtype=dtype)
            product = packed_product(weight, rows) if is_packed else plain_product(weight)
            if product is None:
                return None
            work.append((product, inputs[columns]))

    def run() -> None:
        for product, x in work:
            product(x)

    flop = 2 * rows * repeats * sum(outputs * columns for outputs, columns in shapes)
    return flop / best_seconds(run, windows=3 if rows > 256 else WINDOWS)


def gemm_rates(shapes: Shapes, rows: int, dtype: torch.dtype) -> dict[str, float | None]:
    """FLOP/s of layers and output layer, plain and packed, in torch's threads."""
    # Many rows are bound by arithmetic: two layers suffice.
    repeats = shapes.layers if rows <= 256 else min(2, shapes.layers)
    rates = {}
    for kind, is_packed in (("plain", False), ("packed", True)):
        for part, products, count in (
            ("layers", shapes.layer, repeats),
            ("head", (shapes.head,), 1),
        ):
            rates[f"{part}_{kind}"] = product_rate(
                products, rows, dtype, repeats=count, is_packed=is_packed
            )
    return rates


def model_rate(shapes: Shapes, rates: dict[str, float | None]) -> float:
    """FLOP/s of the products of a forward pass, with the faster kind for layers and head."""
    layers = max(rate for name, rate in rates.items() if rate and name.startswith("layers"))
    head = max(rate for name, rate in rates.items() if rate and name.startswith("head"))
    in_layers = shapes.layers * shapes.layer_weights
    return shapes.weights / (in_layers / layers + math.prod(shapes.head) / head)


@torch.no_grad()
def read_rate(size_bytes: int) -> float:
    """Bytes/s of reading memory in torch's threads: the faster of a sum and a product."""
    columns = 4096
    data = torch.ones(size_bytes // (4 * columns), columns)
    vector = torch.ones(columns)
    seconds = min(best_seconds(data.sum), best_seconds(lambda: torch.mv(data, vector)))
    return data.nbytes / seconds


@torch.no_grad()
def copy_rate(size_bytes: int) -> float:
    """Bytes/s of copying memory in torch's threads; each byte counts once."""
    source = torch.ones(size_bytes // 4)
    target = torch.zeros_like(source)
    return source.nbytes / best_seconds(lambda: target.copy_(source))


def with_threads(threads: int, function: Callable[[], Any]) -> Any:
    """Call the function with this number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


def all_gemm_rates(rows: Sequence[int]) -> dict[str, Any]:
    """FLOP/s by model, dtype, rows and threads."""

    def measure(shapes: Shapes, dtype: torch.dtype, count: int) -> dict[str, Any]:
        return {
            f"{n}_threads": with_threads(n, lambda: gemm_rates(shapes, count, dtype))
            for n in THREADS
        }

    return {
        model: {
            name: {f"{count}_rows": measure(shapes, dtype, count) for count in rows}
            for name, dtype in DTYPES.items()
        }
        for model, shapes in MODELS.items()
    }


def memory_rates(large_bytes: int = LARGE_BYTES) -> dict[str, Any]:
    """Bytes/s by footprint and threads."""
    sizes = {"model_sized": SMALL_BYTES, "beyond_caches": large_bytes}
    return {
        "read_bytes_per_s": {
            name: {f"{n}_threads": with_threads(n, lambda s=size: read_rate(s)) for n in THREADS}
            for name, size in sizes.items()
        },
        "copy_bytes_per_s": {
            f"{n}_threads": with_threads(n, lambda: copy_rate(large_bytes // 2)) for n in THREADS
        },
    }


Ends = tuple[Callable[[bytes], object], Callable[[int], object]]
"""(send a message, receive a message of this size)."""


def loopback() -> dict[str, dict[str, float]]:
    """Bytes/s and round trip of TCP and of ZeroMQ between this process and another one."""
    # spawn: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, context) as other,
        socket.create_server((HOST, 0)) as server,
        zmq.Context() as sockets,
        _pair(sockets) as pair,
    ):
        server.settimeout(PEER_TIMEOUT_S)
        other.submit(_answer, "tcp", server.getsockname()[1])
        with server.accept()[0] as connection:
            found = {"tcp": _ask(*_tcp_ends(connection))}
        other.submit(_answer, "zeromq", pair.bind_to_random_port(f"tcp://{HOST}"))
        return found | {"zeromq": _ask(*_zmq_ends(pair))}


def _ask(send: Callable[[bytes], object], receive: Callable[[int], object]) -> dict[str, float]:
    payload, rates, trips = bytes(MESSAGE_BYTES), [], []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(MESSAGES):
            send(payload)
        receive(1)
        rates.append(MESSAGES * MESSAGE_BYTES / (time.perf_counter() - started))
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        send(bytes(TRIP_BYTES))
        receive(TRIP_BYTES)
        trips.append(time.perf_counter() - started)
    return {"bytes_per_s": max(rates), "round_trip_s": statistics.median(trips)}


def _answer(kind: str, port: int) -> None:
    """The other process: answers the large messages with a byte, and echoes each small message."""
    with zmq.Context() as context, _pair(context) as pair:
        if kind == "tcp":
            send, receive = _tcp_ends(socket.create_connection((HOST, port), PEER_TIMEOUT_S))
        else:
            pair.connect(f"tcp://{HOST}:{port}")
            send, receive = _zmq_ends(pair)
        for _ in range(3):
            for _ in range(MESSAGES):
                receive(MESSAGE_BYTES)
            send(b"1")
        for _ in range(ROUND_TRIPS):
            receive(TRIP_BYTES)
            send(bytes(TRIP_BYTES))


def _tcp_ends(connection: socket.socket) -> Ends:
    connection.settimeout(PEER_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(MESSAGE_BYTES)

    def receive(count: int) -> None:
        view = memoryview(buffer)[:count]
        while view:
            got = connection.recv_into(view)
            if not got:
                raise ConnectionError("the peer closed the connection")
            view = view[got:]

    return connection.sendall, receive


def _pair(context: zmq.Context) -> zmq.Socket:
    pair = context.socket(zmq.PAIR)
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        pair.setsockopt(option, int(PEER_TIMEOUT_S * 1000))
    pair.setsockopt(zmq.LINGER, 1000)
    return pair


def _zmq_ends(pair: zmq.Socket) -> Ends:
    return lambda data: pair.send(data, copy=False), lambda _: pair.recv(copy=False)


def main() -> int:
    quick = parser(__doc__, quick="64 rows, smaller footprints").parse_args().quick
    found = {
        "mode": "quick" if quick else "full",
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gemm_flops_per_s": all_gemm_rates((64,) if quick else (64, 2048)),
        **memory_rates((1 << 30) if quick else LARGE_BYTES),
        "loopback": loopback(),
    }
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
