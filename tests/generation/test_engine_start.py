"""How long a generator asks for room before it starts its engine; over real sockets."""

import asyncio
import time
from pathlib import Path

import pytest

from generation import weight_client
from generation.async_sockets import AsyncDealer
from generation.engine import EngineError
from megatron_rl.protocol.types import MayStart, Ping, StartRequest
from megatron_rl.protocol.wire import Router
from tests.ports import free_port


def ask(port: int, limit_s: float, after: Path | None = None) -> float:
    """Seconds until it may start."""

    async def wait() -> float:
        started = time.monotonic()
        with AsyncDealer(f"127.0.0.1:{port}", "a") as dealer:
            await weight_client.await_room(dealer, limit_s, after=after)
        return time.monotonic() - started

    return asyncio.run(wait())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_client, "ASK_S", 0.1)


def test_a_trainer_that_never_leaves_room_is_given_up_with_the_settings_named() -> None:
    started = time.monotonic()
    with pytest.raises(
        EngineError, match="no room for an engine in 0 s .expert.train.batch_timeout_s"
    ):
        ask(free_port(), 0.4)
    assert 0.4 <= time.monotonic() - started < 20


def test_a_cold_start_takes_as_long_as_it_needs(tmp_path: Path) -> None:
    """And where its folder never comes, as in a run that goes on without it, an answer counts."""
    port, folder = free_port(), tmp_path / "cold_start"

    async def answer_late() -> float:
        asked = asyncio.create_task(asyncio.to_thread(ask, port, 0.2, folder))
        await asyncio.sleep(0.8)
        assert not asked.done()
        with Router("127.0.0.1", port) as router:
            received = await asyncio.to_thread(router.receive, 5)
            assert received is not None and isinstance(received[1], StartRequest)
            # Of what was meant for its predecessor nothing is obeyed.
            router.send(received[0], Ping())
            router.send(received[0], MayStart())
            return await asked

    assert asyncio.run(answer_late()) >= 0.8
    folder.mkdir()
    with pytest.raises(EngineError, match="no room"):
        ask(free_port(), 0.2, folder)
