"""What nobody waits for ends in the engine, and what takes too long in its time."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from generation.async_sockets import AsyncDealer
from generation.engine import EngineError, load_engine
from generation.hf_engine import HFEngine
from generation.worker import GeneratorWorker
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import (
    Cancel,
    ChatMessage,
    Lease,
    Prompt,
    RolloutDone,
    RolloutFailed,
    Sampling,
    Stop,
)  # fmt: skip
from megatron_rl.protocol.wire import Router
from tests.generation.engine_driver import make_setup
from tests.ports import free_port

WAIT_S = 30.0
CONTEXT_TOKENS = 4096
"""The first lease takes seconds: a busy machine still sees it in the engine."""


def lease(lease_id: int, count: int, max_new_tokens: int, content: str = "12+7") -> Lease:
    prompt = Prompt(f"p{lease_id}", "exact", [ChatMessage("user", content)], "19")
    return Lease(lease_id, prompt, list(range(count)), Sampling(max_new_tokens, 1.0))


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)


async def serve_and_cancel(folder: Path, log_path: Path, port: int) -> list[object]:
    """What the worker sends back for leases of which the first is cancelled."""
    # No token ends a completion: each has as many as it may have.
    engine = HFEngine(
        make_setup(
            folder.parent, log_path, stop_ids=(), max_running=4, context_tokens=CONTEXT_TOKENS
        )
    )
    format_checks = {"exact": "none"}
    renderer = Renderer(
        RenderConfig(), folder, context_tokens=CONTEXT_TOKENS, format_checks=format_checks
    )
    await engine.start()
    answers: list[object] = []

    def receive(router: Router) -> bool:
        while (received := router.receive(0)) is not None:
            answers.append(received[1])
        return True

    with Router("127.0.0.1", port) as router, AsyncDealer(f"127.0.0.1:{port}", "g") as queue:
        worker = GeneratorWorker(engine, renderer, queue, capacity=4)
        worker.announce()
        await wait_until(lambda: receive(router) and len(answers) == 1)
        serving = asyncio.create_task(worker._receive())
        router.send("g", lease(1, 4, max_new_tokens=4000))
        await wait_until(lambda: len(engine._requests) == 4)
        router.send("g", Cancel(1))
        router.send("g", Cancel(99))  # it finished while this was on its way
        await wait_until(lambda: not engine._requests and worker._activity.running == 0)
        router.send("g", lease(2, 4, max_new_tokens=3))
        await wait_until(lambda: receive(router) and len(answers) == 5)
        router.send("g", lease(3, 1, max_new_tokens=3, content="x" * 5000))
        await wait_until(lambda: receive(router) and len(answers) == 6)
        router.send("g", Stop("enough"))
        await asyncio.wait_for(serving, WAIT_S)
    await engine.close()
    return answers[1:]


@pytest.mark.timeout(300)
def test_cancelled_lease_ends_in_the_engine_and_nothing_of_it_is_sent(
    models_dir: Path, tmp_path: Path
) -> None:
    *done, failed = asyncio.run(
        serve_and_cancel(models_dir / "old", tmp_path / "hf.log", free_port())
    )
    assert all(isinstance(message, RolloutDone) for message in done)
    assert sorted((m.rollout.lease_id, m.rollout.index) for m in done) == [
        (2, 0), (2, 1), (2, 2), (2, 3),
    ]  # fmt: skip
    assert isinstance(failed, RolloutFailed)
    assert (failed.lease_id, failed.drop_as) == (3, "prompt_unrenderable")


@pytest.mark.parametrize("engine_name", ["sglang", "hf"])
def test_request_that_a_weight_sync_holds_up_fails_in_its_time(
    engine_name: str, tmp_path: Path
) -> None:
    async def generate() -> None:
        engine = load_engine(engine_name)(make_setup(tmp_path, tmp_path, request_timeout_s=0.1))
        engine._is_serving.clear()  # as `pause` does; the engine is not started for this
        async with aclosing(engine.generate([5, 6], Sampling(4, 1.0), [0])) as answers:
            await asyncio.wait_for(anext(answers), WAIT_S)

    with pytest.raises(EngineError, match="a weight sync kept a request waiting"):
        asyncio.run(generate())
