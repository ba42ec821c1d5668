"""A generator that is asked to leave finishes its leases in its time, or gives them back."""

import asyncio
from pathlib import Path

import pytest

from generation.async_sockets import AsyncDealer
from generation.hf_engine import HFEngine
from generation.tasks import LeaveRequest
from generation.worker import GeneratorWorker
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import (
    GeneratorReady,
    Hello,
    RolloutDone,
    RolloutsTaken,
    Stop,
)
from megatron_rl.protocol.wire import Router
from tests.generation.engine_driver import make_setup
from tests.generation.test_cancel import WAIT_S, lease, wait_until
from tests.ports import free_port

LEASE, CROSSING = 1, 2


async def serve_and_leave(
    folder: Path, log_path: Path, *, tokens: int, limit_s: float
) -> list[object]:
    """What the queue and the syncer hear, from the moment that the generator is asked to leave."""
    engine = HFEngine(make_setup(folder.parent, log_path, stop_ids=(), max_running=4))
    checks = {"exact": "none"}
    renderer = Renderer(RenderConfig(), folder, context_tokens=512, format_checks=checks)
    await engine.start()
    heard: list[object] = []
    ports, request = [free_port(), free_port()], LeaveRequest(limit_s)
    with (
        Router("127.0.0.1", ports[0]) as queue,
        Router("127.0.0.1", ports[1]) as syncer,
        AsyncDealer(f"127.0.0.1:{ports[0]}", "g") as to_queue,
        AsyncDealer(f"127.0.0.1:{ports[1]}", "g") as to_syncer,
    ):

        def hear() -> bool:
            for router in (queue, syncer):
                while (received := router.receive(0)) is not None:
                    heard.append(received[1])
            return True

        def has_left() -> bool:
            """It names no lease any more; every completion is confirmed, as by the queue."""
            hear()
            done = [one.rollout for one in heard if isinstance(one, RolloutDone)]
            queue.send("g", RolloutsTaken([(one.lease_id, one.index) for one in done]))
            return any(isinstance(m, GeneratorReady) and m.leases == [] for m in heard)

        worker = GeneratorWorker(engine, renderer, to_queue, capacity=4)
        serving = asyncio.create_task(worker.run(to_syncer, request))
        await wait_until(lambda: hear() and len(heard) >= 2)
        queue.send("g", lease(LEASE, 4, max_new_tokens=tokens))
        await wait_until(lambda: worker._owed.get(LEASE) is not None)
        hear()
        heard.clear()
        request.asked.set()
        await wait_until(lambda: worker._is_leaving)
        queue.send("g", lease(CROSSING, 4, max_new_tokens=3))
        await wait_until(has_left)
        queue.send("g", Stop("it has left the run"))
        await asyncio.wait_for(serving, WAIT_S)
        assert not engine._requests
    await engine.close()
    return heard


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tokens", "limit_s", "finished"), [(3, 60.0, 4), (480, 0.0, 0)])
def test_a_leaving_generator_finishes_or_gives_back_its_lease_and_takes_no_other(
    models_dir: Path, tmp_path: Path, tokens: int, limit_s: float, finished: int
) -> None:
    heard = asyncio.run(
        serve_and_leave(models_dir / "old", tmp_path / "hf.log", tokens=tokens, limit_s=limit_s)
    )
    states = [one for one in heard if isinstance(one, GeneratorReady)]
    assert all(state.is_leaving for state in states)
    # It names its lease until it has finished it or given it back, and the crossing one never.
    assert states[0].leases == [LEASE] and states[-1].leases == []
    assert {tuple(state.leases) for state in states} == {(LEASE,), ()}
    done = [one.rollout for one in heard if isinstance(one, RolloutDone)]
    assert sorted((one.lease_id, one.index) for one in done) == [
        (LEASE, index) for index in range(finished)
    ]
    assert all(one.is_leaving for one in heard if isinstance(one, Hello))
    assert any(isinstance(one, Hello) for one in heard)
