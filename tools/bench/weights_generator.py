"""A generator of tools.bench.weights, which samples nothing: it only takes weights.

Entry: `python -m tools.bench.weights_generator --config FILE --index 0`. It is the product's weight
client before an SGLang server; with BENCH_BARE=1 before the product's receiver and parameters of an
engine of one rank, so that many generators fit on one node.
"""

import asyncio
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from generation.async_sockets import AsyncDealer
from generation.engine import EngineError, engine_setup
from generation.sglang_engine import SGLangEngine
from generation.tasks import end_with_first, interrupted
from generation.weight_client import WeightClient
from generation.worker import parse_arguments
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange import engine_rank
from megatron_rl.weights.exchange.engine_rank import Receiver
from megatron_rl.weights.exchange.parcels import receive
from megatron_rl.weights.layout.engine_layout import engine_slices
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Share
from tools.bench.weights_exchanges import RECEIVE
from tools.bench.weights_figures import BARE_VARIABLE


class MeasuredEngine(SGLangEngine):
    """SGLang whose ranks take parcels by the benchmark's loader."""

    loader = "tools.bench.weights_loader.load"


class BareEngine:
    """Parameters of an engine of one rank, which samples nothing."""

    name, engine_version, world_size = "bare", "1", 1
    ffn_multiple, expert_parallel = 1, 1

    def __init__(self, config: Config) -> None:
        self.version = -1
        self._parameters = allocate(config)
        self._by_method: dict[str, Receiver] = {}

    async def pause(self) -> None:
        """Nothing runs."""

    async def receive(self, order: Receive) -> None:
        """Take the parcels, or plain bytes."""
        await asyncio.to_thread(self._take, order)

    def _take(self, order: Receive) -> None:
        method = order.group_name.partition("-")[0]
        with patch.object(engine_rank, "receive", RECEIVE.get(method, receive)):
            self._receiver_of(order.group_name).take(order)

    def _receiver_of(self, group_name: str) -> Receiver:
        """One a method: each keeps its group between the turns of the others."""
        method = group_name.partition("-")[0]
        if method not in self._by_method:
            dtype = next(iter(self._parameters.values())).dtype
            self._by_method[method] = Receiver(
                lambda: self._parameters, 0, dtype, may_pad_ffn=False
            )
        return self._by_method[method]

    async def resume(self, version: int) -> None:
        """Hold the version."""
        self.version = version

    async def leave_group(self) -> None:
        """Let go of all groups."""
        for each in self._by_method.values():
            each.leave()


def allocate(config: Config) -> dict[str, torch.Tensor]:
    """Room for all slices of an engine of one rank."""
    sizes: dict[str, list[int]] = {}
    for part in engine_slices(read_shape(config.model.path), Share()):
        size = sizes.setdefault(part.local, [0, 0])
        size[0] = max(size[0], part.local_row + part.rows)
        size[1] = max(size[1], part.local_column + part.columns)
    dtype = getattr(torch, config.model.dtype)
    return {
        name: torch.zeros(rows, columns, dtype=dtype) for name, (rows, columns) in sizes.items()
    }


def main(config_path: Path, index: int) -> None:
    """Take weights until a signal arrives."""
    config = load_config(config_path)
    set_up_logging(f"generator-{index}", config.run.dir / "logs")
    is_bare = os.environ.get(BARE_VARIABLE) == "1"
    serving = serve_bare(config, index) if is_bare else serve(config, index)
    asyncio.run(end_with_first(interrupted(), serving))


async def serve_bare(config: Config, index: int) -> None:
    """Obey the trainer without an engine."""
    torch.set_num_threads(1)
    endpoint = f"{config.ports.host}:{config.ports.weights}"
    with AsyncDealer(endpoint, f"generator-{index}") as dealer:
        await WeightClient(dealer, BareEngine(config), lambda: None).run()  # type: ignore[arg-type]


async def serve(config: Config, index: int) -> None:
    """Raises EngineError when the server dies."""
    engine = MeasuredEngine(engine_setup(config, index, ()))

    async def watch() -> None:
        raise EngineError(await engine.failed())

    try:
        await engine.start()
        endpoint = f"{config.ports.host}:{config.ports.weights}"
        with AsyncDealer(endpoint, f"generator-{index}") as dealer:
            await end_with_first(WeightClient(dealer, engine, lambda: None).run(), watch())
    finally:
        await engine.close()


if __name__ == "__main__":
    options = parse_arguments()
    sys.exit(run_main(f"generator-{options.index}", lambda: main(options.config, options.index)))
