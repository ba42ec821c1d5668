"""A ROUTER on an event loop: answers reach who asked, peers of another label are turned away."""

import asyncio

import numpy as np
import pytest

from generation.async_dealer import AsyncDealer
from generation.async_router import AsyncRouter
from megatron_rl.protocol.scorer_messages import LogprobRequest, LogprobsDone
from megatron_rl.protocol.wire import TurnedAway, WireError
from tests.ports import free_port

LIMIT_S = 10.0


def request(number: int) -> LogprobRequest:
    return LogprobRequest(number, np.arange(number + 2, dtype=np.int32), 1)


async def echo(router: AsyncRouter) -> None:
    """Answers each request by as many zeros as it wants logprobs."""
    while True:
        peer, asked = await router.next_message()
        found = np.zeros(len(asked.token_ids) - asked.start, np.float32)
        assert router.send(peer, LogprobsDone(asked.request_id, found))


async def talk(port: int) -> tuple[dict[str, list[int]], str]:
    """What each of two peers is answered to many requests at once, and what a stranger hears."""
    address, found = f"127.0.0.1:{port}", {}
    with (
        AsyncRouter("127.0.0.1", port, label="run") as router,
        AsyncDealer(address, "one", label="run") as one,
        AsyncDealer(address, "two", label="run") as two,
        AsyncDealer(address, "one", label="other run") as stranger,
    ):
        answering = asyncio.create_task(echo(router))
        stranger.send(request(1))
        for number in range(200):
            one.send(request(number))
            two.send(request(1000 + number))
        for name, dealer in (("one", one), ("two", two)):
            answers = [await dealer.next_message(LIMIT_S) for _ in range(200)]
            found[name] = [a.request_id for a in answers]
            assert all(len(a.logprobs) == a.request_id + 1 for a in answers)
        with pytest.raises(TurnedAway) as refusal:
            await stranger.next_message(LIMIT_S)
        assert not router.send("nobody", LogprobsDone(0, np.zeros(1, np.float32)))
        answering.cancel()
        return found, str(refusal.value)


def test_each_peer_has_its_answers_in_order_and_a_stranger_none() -> None:
    found, refusal = asyncio.run(asyncio.wait_for(talk(free_port()), 60))
    assert found == {"one": list(range(200)), "two": list(range(1000, 1200))}
    assert "does not serve 'other run'" in refusal


def test_an_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(WireError, match=r"refusing to bind 0\.0\.0\.0 without CURVE keys"):
        AsyncRouter("0.0.0.0", free_port())  # noqa: S104 - what is refused
