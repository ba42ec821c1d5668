"""A generator of tools.bench.weights: the product's weight client before an SGLang server.

Entry: `python -m tools.bench.weights_generator --config FILE --index 0`. It syncs nothing to a
queue and samples nothing: it only takes weights.
"""

import asyncio
import sys
from pathlib import Path

from generation.async_dealer import AsyncDealer
from generation.engine import EngineError, engine_setup
from generation.sglang_engine import SGLangEngine
from generation.tasks import end_with_first, interrupted
from generation.weight_client import WeightClient
from generation.worker import parse_arguments
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.process import run_main, set_up_logging
from tools.bench.weights_loader import LOADER


class MeasuredEngine(SGLangEngine):
    """SGLang whose ranks take parcels by the benchmark's loader."""

    loader = LOADER


def main(config_path: Path, index: int) -> None:
    """Take weights until a signal arrives."""
    config = load_config(config_path)
    set_up_logging(f"generator-{index}", config.run.dir / "logs")
    asyncio.run(end_with_first(interrupted(), serve(config, index)))


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
