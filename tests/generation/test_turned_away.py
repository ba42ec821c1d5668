"""A generator that meets the queue of another phase ends with a line that says so."""

import asyncio
from pathlib import Path

import pytest

from generation.async_sockets import AsyncDealer
from generation.hf_engine import HFEngine
from generation.worker import GeneratorWorker
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.wire import Router, TurnedAway
from tests.generation.test_engine_contract import make_setup
from tests.ports import free_port


async def meet(folder: Path, log_path: Path, port: int) -> Router:
    # Not started: it has no weights, and gets no lease here.
    engine = HFEngine(make_setup(folder.parent, log_path, stop_ids=(), max_running=4))
    renderer = Renderer(RenderConfig(), folder, context_tokens=512, format_checks={"exact": "none"})
    address = f"127.0.0.1:{port}"
    with (
        Router("127.0.0.1", port, label="a.step_2") as router,
        AsyncDealer(address, "generator-0", label="a.step_1") as queue,
    ):
        worker = GeneratorWorker(engine, renderer, queue, capacity=4)
        serving = asyncio.create_task(worker._receive())
        for _ in range(300):
            if serving.done():
                break
            if not router.turned_away:
                worker.announce()
            assert router.receive(0) is None
            await asyncio.sleep(0.05)
        # Not a group of errors: `run_main` makes one line of a WireError.
        with pytest.raises(TurnedAway, match="does not serve this process of phase step_1"):
            await asyncio.wait_for(serving, 20.0)
        return router


def test_a_generator_of_another_phase_ends(models_dir: Path, tmp_path: Path) -> None:
    router = asyncio.run(meet(models_dir / "old", tmp_path / "hf.log", free_port()))
    assert set(router.turned_away) == {"generator-0@a.step_1"}
