"""A ROUTER on an event loop, and a scorer behind it: answers reach the peer that asked."""

import asyncio

import numpy as np
import pytest

from generation.async_sockets import AsyncDealer, AsyncRouter
from generation.scorer import Scorer
from megatron_rl.protocol.scorer_messages import LogprobRequest, LogprobsDone
from megatron_rl.protocol.types import GeneratorReady, Stop
from megatron_rl.protocol.wire import MAX_REFUSED, TurnedAway, WireError
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
    assert "does not serve this process: " in refusal


def test_an_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(WireError, match=r"refusing to bind 0\.0\.0\.0 without CURVE keys"):
        AsyncRouter("0.0.0.0", free_port())  # noqa: S104 - what is refused


class Zeros:
    """An engine that answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked: list[int] = []

    async def logprobs(self, token_ids: list[int], start: int) -> list[float]:
        self.asked.append(len(token_ids))
        await self.may_answer.wait()
        return [0.0] * (len(token_ids) - start)

    async def failed(self) -> str:
        await asyncio.sleep(3600)
        return "never"


async def answers(dealer: AsyncDealer, count: int) -> list[tuple[str, int]]:
    found = [await dealer.next_message(LIMIT_S) for _ in range(count)]
    return [(type(one).__name__, one.request_id) for one in found]


async def disturb(port: int, *, refused: int) -> Zeros:
    """One rank asks, another one asks and then sends what makes no sense."""
    address, engine = f"127.0.0.1:{port}", Zeros()
    with (
        AsyncRouter("127.0.0.1", port) as router,
        AsyncDealer(address, "good") as good,
        AsyncDealer(address, "bad") as bad,
    ):
        serving = asyncio.create_task(Scorer(engine, router, 8).run())
        good.send(request(1))
        bad.send(request(2))
        while sorted(engine.asked) != [3, 4]:
            await asyncio.sleep(0.01)
        bad.send(GeneratorReady(1, 0, 1))
        for _ in range(refused - 1):
            await bad._awaitable.send_multipart([b"\xc3", b"no message"])
        floats = LogprobRequest(3, np.ones(4, np.float32), 1)
        negative = LogprobRequest(4, np.array([5, -1], np.int32), 1)
        for one in (floats, negative):
            bad.send(one)
        assert await answers(bad, 2) == [("LogprobsFailed", 3), ("LogprobsFailed", 4)]
        engine.may_answer.set()
        assert await answers(good, 1) == [("LogprobsDone", 1)]
        # What it had asked for is dropped; asked again it is answered.
        assert await bad.next_message(0.2) is None
        bad.send(request(2))
        assert await answers(bad, 1) == [("LogprobsDone", 2)]
        good.send(Stop("the end"))
        await asyncio.wait_for(serving, LIMIT_S)
    return engine


def test_a_senseless_message_costs_its_sender_and_not_the_scorer() -> None:
    engine = asyncio.run(disturb(free_port(), refused=3))
    # Numbers that are no token ids do not reach the engine.
    assert sorted(engine.asked) == [3, 4, 4]


def test_a_peer_that_makes_no_sense_is_turned_away_and_the_scorer_serves_on() -> None:
    async def disturb_for_long(port: int) -> None:
        address, engine = f"127.0.0.1:{port}", Zeros()
        engine.may_answer.set()
        with (
            AsyncRouter("127.0.0.1", port) as router,
            AsyncDealer(address, "good") as good,
            AsyncDealer(address, "bad") as bad,
        ):
            serving = asyncio.create_task(Scorer(engine, router, 8).run())
            for _ in range(MAX_REFUSED):
                await bad._awaitable.send_multipart([b"\xc3", b"no message"])
            with pytest.raises(WireError, match="turns this process away: 100 of its messages"):
                await bad.next_message(LIMIT_S)
            good.send(request(1))
            assert await answers(good, 1) == [("LogprobsDone", 1)]
            assert router.refused == {"bad": MAX_REFUSED}
            good.send(Stop("the end"))
            await asyncio.wait_for(serving, LIMIT_S)

    asyncio.run(disturb_for_long(free_port()))
