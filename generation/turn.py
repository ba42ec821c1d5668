"""Starts the engine; with `generator.release_memory` when the trainer leaves room on its GPU.

Used by the generator process: DEALER to the weights endpoint (StartRequest, MayStart), which
carries nothing else before the engine is there.
"""

import logging
import time
from pathlib import Path

from generation.async_dealer import AsyncDealer
from generation.engine import Engine, EngineError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.exports import COLD_START
from megatron_rl.protocol.process import note_ready
from megatron_rl.protocol.types import MayStart, StartRequest

log = logging.getLogger(__name__)

ASK_S = 2.0


async def start_engine(config: Config, engine: Engine, weights: AsyncDealer) -> None:
    """Start the engine, as soon as there is room for it. Raises EngineError."""
    generator = config.generator
    asks = generator.release_memory and generator.wait_for_weight_sync
    if asks:
        limit_s = config.train.batch_timeout_s + generator.start_timeout_s
        cold_start = config.run.dir / "hf" / COLD_START if config.sft.steps else None
        await await_room(weights, limit_s + config.weights.join_timeout_s, after=cold_start)
    started = time.monotonic()
    await engine.start()
    elapsed_s = time.monotonic() - started
    log.info("%s %s is ready after %.0f s", engine.name, engine.engine_version, elapsed_s)
    note_ready()
    # What came meanwhile was meant for a generator of this name that died.
    while asks and await weights.next_message(0.0) is not None:
        pass


async def await_room(dealer: AsyncDealer, limit_s: float, *, after: Path | None = None) -> None:
    """Return when the trainer says that there is room. Raises EngineError after limit_s.

    after: a folder that comes first, and takes as long as it needs: the model of a cold start.
    """
    log.info("the engine starts when the trainer leaves room for it")
    session, ends_at = time.time_ns(), None
    while ends_at is None or time.monotonic() < ends_at:
        if ends_at is None and (after is None or after.exists()):
            ends_at = time.monotonic() + limit_s
        dealer.send(StartRequest(session))
        ask_at = time.monotonic() + ASK_S
        # What else comes was meant for a generator of this name that died.
        while (message := await dealer.next_message(ask_at - time.monotonic())) is not None:
            if isinstance(message, MayStart):
                return
    raise EngineError(
        f"the trainer left no room for an engine in {limit_s:.0f} s (expert.train.batch_timeout_s, "
        "expert.generator.start_timeout_s and expert.weights.join_timeout_s together)"
    )
