"""An engine under test: what it is started with, and an event loop to call it on."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from generation.engine import Completion, Engine, EngineSetup
from megatron_rl.protocol.types import Sampling
from tests.generation.precision import DTYPE_NAME, PATIENCE
from tests.generation.tiny_model import EOS_ID
from tests.ports import free_port

LIMIT_S = 60.0 * PATIENCE


def make_setup(models_dir: Path, log_path: Path, **changes: Any) -> EngineSetup:
    values: dict[str, Any] = {
        "model": models_dir / "old",
        "dtype": DTYPE_NAME,
        "stop_ids": (EOS_ID,),
        "tensor_parallel": 1,
        "max_running": 48,
        "kv_tokens": 16_384,
        "context_tokens": 512,
        "nice": 0,
        "start_timeout_s": 140.0 * PATIENCE,
        "request_timeout_s": LIMIT_S,
        "weights_timeout_s": 30.0,
        "host": "127.0.0.1",
        "port": free_port(),
        "seed": 0,
        "version": 0,
        "log_path": log_path,
    }
    return EngineSetup(**(values | changes))


@dataclass
class Driver:
    """A started engine and the event loop it lives on."""

    engine: Engine
    loop: asyncio.AbstractEventLoop
    port: int = 0
    processes: list[psutil.Process] = field(default_factory=list)
    """What the engine started."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, LIMIT_S))

    async def collect(
        self, prompt: list[int], sampling: Sampling, indices: list[int]
    ) -> list[Completion]:
        """Completions in the order in which they were delivered."""
        async with aclosing(self.engine.generate(prompt, sampling, indices)) as answers:
            return [completion async for completion in answers]

    async def collect_amid(
        self, event: Coroutine[Any, Any, Any], prompt: list[int], sampling: Sampling, count: int
    ) -> list[Completion]:
        """Completions of `count` streams; `event` starts after the first completion.

        Each stream asks for one completion after another until `event` is done: some are in
        flight whenever it acts, however slow the machine is. It waits for a part of the time of a
        completion, so that those which start with it have tokens when it acts.
        """
        happening: asyncio.Task[Any] | None = None
        started = time.monotonic()

        async def act(after_s: float) -> None:
            await asyncio.sleep(after_s)
            await event

        async def stream(index: int) -> list[Completion]:
            nonlocal happening
            found = await self.collect(prompt, sampling, [index])
            took_s = time.monotonic() - started
            happening = happening or asyncio.create_task(act(0.3 * took_s))
            while not happening.done():
                found += await self.collect(prompt, sampling, [index])
            return found

        streams = await asyncio.gather(*(stream(index) for index in range(count)))
        assert happening is not None
        await happening
        return [completion for found in streams for completion in found]


@contextmanager
def driven(engine: Engine) -> Iterator[Driver]:
    """Start an engine on a new event loop; the context closes both."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.start())
        yield Driver(engine, loop)
    finally:
        loop.run_until_complete(engine.close())
        loop.close()
