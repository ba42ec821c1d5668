"""Engines that hang are given up by their work, and pauses are no hangs."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from generation.async_sockets import AsyncDealer
from generation.child import ServerChild
from generation.engine import Completion, EngineError, EngineTimeout
from generation.health import Activity, EngineHealth, watch_work
from generation.weight_client import WeightClient
from generation.worker import GeneratorWorker
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import Cancel, Failed, Fence, Pause, Receive, Resume
from megatron_rl.protocol.wire import Router
from tests.generation.test_cancel import lease, wait_until
from tests.generation.tiny_model import write_tokenizer
from tests.ports import free_port


def seconds_until_fault(health: EngineHealth, *, until: int, **state: Any) -> int | None:
    """When a look every 2 s finds a fault first; None: not by then."""
    for now in range(0, until, 2):
        if health.look(float(now), **state):
            return now
    return None


@pytest.mark.parametrize(("counts_passes", "expected"), [(True, 76), (False, 376)])
def test_an_engine_with_work_that_does_nothing_hangs(counts_passes: bool, expected: int) -> None:
    # A quarter of 300 s, or five quarters, are 75 and 375 s.
    health = EngineHealth(300.0, counts_passes=counts_passes)
    assert seconds_until_fault(health, until=600, running=3, is_paused=False) == expected


def test_pauses_idleness_and_progress_are_no_hangs() -> None:
    health = EngineHealth(300.0, counts_passes=True)
    assert seconds_until_fault(health, until=900, running=3, is_paused=True) is None
    assert seconds_until_fault(health, until=900, running=0, is_paused=False) is None
    for now in range(1000, 2000, 2):
        health.note_count(now // 70)
        assert health.look(float(now), running=3, is_paused=False) == ""
    # The engine answers no more, or answers the same.
    for now in range(2000, 2200, 2):
        health.note_count(None if now % 4 else 1999 // 70)
        if health.look(float(now), running=3, is_paused=False):
            break
    # The last change was that of 1960; the 2 s before that look count too.
    assert now == 1958 + 76


def test_a_standstill_of_the_process_itself_is_no_hang_of_its_engine() -> None:
    health = EngineHealth(300.0, counts_passes=True)
    assert health.look(0.0, running=3, is_paused=False) == ""
    assert health.look(500.0, running=3, is_paused=False) == ""


class Stub:
    """An engine of which only calls about weights are made."""

    name, engine_version = "stub", "1"
    world_size = ffn_multiple = expert_parallel = 1
    version = 4

    def __init__(self, errors: list[type[EngineError] | None]) -> None:
        self._errors = errors

    async def pause(self) -> None:
        if error := self._errors.pop(0):
            raise error("/pause_generation: no answer in 120 s")

    async def resume(self, version: int) -> None:
        self.version = version

    async def leave_group(self) -> None:
        pass


class Sent(list[Any]):
    send = list.append


@pytest.mark.parametrize(
    ("errors", "survives"),
    [
        ([EngineTimeout, EngineTimeout], False),
        ([EngineTimeout, None, EngineTimeout], True),
        ([EngineError, EngineError, EngineTimeout], True),
    ],
)
def test_an_engine_that_leaves_two_weight_calls_unanswered_ends_its_generator(
    errors: list[type[EngineError] | None], survives: bool
) -> None:
    client = WeightClient(Sent(), Stub(list(errors)), on_version=lambda: None)

    async def sync_twice() -> None:
        for error in errors:
            await client._answer(Pause())
            assert client.is_paused
            if error is None:
                await client._answer(Resume(5))
                assert not client.is_paused

    if survives:
        asyncio.run(sync_twice())
        return
    with pytest.raises(EngineError, match="the engine hangs: it left 2 calls"):
        asyncio.run(sync_twice())


def test_a_paused_generator_says_so_until_it_resumes() -> None:
    client = WeightClient(Sent(), Stub([None, None]), on_version=lambda: None)
    said = []
    for message in (Pause(), Fence("a trainer died"), Pause(), Resume(5)):
        asyncio.run(client._answer(message))
        hello = client._hello()
        said.append((hello.is_paused, hello.version))
    assert said == [(True, 4), (True, -1), (True, -1), (False, 5)]


def test_new_weights_are_refused_while_the_engine_runs() -> None:
    sent, engine = Sent(), Stub([])
    client = WeightClient(sent, engine, on_version=lambda: None)
    asyncio.run(client._answer(Receive("127.0.0.1", 1, "s", "generator-0", 0, "gloo", 1, 5, 1.0)))
    assert [(type(one), one.doing) for one in sent] == [(Failed, "Receive")]
    assert engine.version == -1


class HungEngine(Stub):
    """It takes completions and never ends one."""

    async def generate(self, *args: Any) -> AsyncIterator[Completion]:
        await asyncio.sleep(3600)
        yield Completion(0, [], [], [], "stop")


@pytest.mark.parametrize(("version", "hangs"), [(4, True), (-1, False)])
def test_an_engine_without_weights_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, version: int, hangs: bool
) -> None:
    monkeypatch.setattr("generation.health.LOOK_S", 0.01)
    engine, work = Stub([]), Activity()
    engine.version = version
    weights = WeightClient(Sent(), engine, on_version=lambda: None)
    work.change(0.0, 3)
    health = EngineHealth(0.1, counts_passes=False)
    watching = asyncio.wait_for(watch_work(engine, health, work, weights), 1.0)
    with pytest.raises(EngineError if hangs else TimeoutError):
        asyncio.run(watching)


def test_cancels_do_not_put_off_the_verdict_that_an_engine_hangs(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    checks = {"exact": "none"}
    renderer = Renderer(RenderConfig(), tmp_path, context_tokens=512, format_checks=checks)

    async def cancel_again_and_again(port: int) -> str:
        with Router("127.0.0.1", port) as router, AsyncDealer(f"127.0.0.1:{port}", "g") as queue:
            worker = GeneratorWorker(HungEngine([]), renderer, queue, 4, request_timeout_s=300.0)
            worker.announce()
            assert await asyncio.to_thread(router.receive, 10.0) is not None
            serving = asyncio.create_task(worker._receive())
            fault = ""
            for number in range(60):
                router.send("g", lease(number, 1, max_new_tokens=3))
                if number:
                    router.send("g", Cancel(number - 1))
                await wait_until(lambda n=number: set(worker._owed) == {n})
                # One lease is open at each look, every 10 s: five quarters of 300 s are 375 s.
                running = len(worker._owed)
                fault = worker._health.look(10.0 * number, running=running, is_paused=False)
                if fault:
                    break
            serving.cancel()
            return f"{number}: {fault}"

    assert asyncio.run(cancel_again_and_again(free_port())).startswith("38: the engine hangs")


SERVER = """
import os, signal, sys, time
if os.fork() == 0:
    import setproctitle
    setproctitle.setproctitle('sglang::scheduler')
    open(sys.argv[1] + '.tmp', 'w').write(str(os.getpid()))
    os.rename(sys.argv[1] + '.tmp', sys.argv[1])
time.sleep(600)
"""


@pytest.mark.timeout(300)
def test_a_scheduler_that_dies_is_missed_at_once_while_its_server_lives(tmp_path: Path) -> None:
    async def kill() -> tuple[str, float]:
        child = ServerChild(tmp_path / "server.log")
        pid_file = tmp_path / "pid"
        await child.start([sys.executable, "-c", SERVER, str(pid_file)], {})
        try:
            while not pid_file.exists():
                await asyncio.sleep(0.02)
            lost = asyncio.ensure_future(child.lost("sglang::"))
            await asyncio.sleep(0.3)
            assert not lost.done()
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
            started = time.monotonic()
            reason = await asyncio.wait_for(lost, 100)
            assert not child.has_exited
            return reason, time.monotonic() - started
        finally:
            await child.close()

    reason, seconds = asyncio.run(kill())
    assert "its process sglang::scheduler ended" in reason and seconds < 20
