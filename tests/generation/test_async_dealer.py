"""What a generator's socket says of a message that it cannot send."""

import asyncio

import pytest
import zmq

from generation.async_sockets import AsyncDealer
from megatron_rl.protocol.types import Ack
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from tests.ports import free_port

QUEUE_MESSAGES = 3


@pytest.fixture
def address() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{free_port()}"


def small_dealer(address: str) -> AsyncDealer:
    """A dealer whose queue is soon full; a socket takes its limit from its next connection on."""
    dealer = AsyncDealer(address, "generator-0")
    dealer.socket.disconnect(f"tcp://{address}")
    dealer.socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    dealer.socket.setsockopt(zmq.LINGER, 0)
    dealer.socket.connect(f"tcp://{address}")
    return dealer


def test_a_message_beyond_a_full_queue_is_a_deadline_that_names_the_peer(address: str) -> None:
    async def send() -> None:
        with small_dealer(address) as dealer:
            for _ in range(QUEUE_MESSAGES):
                dealer.send(Ack("Pause"))
            with pytest.raises(DeadlineExceeded, match=f"wait unsent for {address}"):
                dealer.send(Ack("Pause"))

    asyncio.run(send())


def test_a_message_on_a_closed_socket_is_an_error(address: str) -> None:
    async def send() -> None:
        dealer = small_dealer(address)
        dealer.close()
        with pytest.raises(WireError, match=f"cannot send Ack to {address}: .*non-socket"):
            dealer.send(Ack("Pause"))

    asyncio.run(send())


def test_a_message_that_would_be_sent_later_is_an_error(address: str) -> None:
    """Nobody would see that it failed: it waits behind one that waits for room."""

    async def send() -> None:
        with small_dealer(address) as dealer:
            for _ in range(QUEUE_MESSAGES):
                dealer.send(Ack("Pause"))
            waiting = dealer._awaitable.send(b"without DONTWAIT")
            with pytest.raises(DeadlineExceeded, match=f"wait unsent for {address}"):
                dealer.send(Ack("Pause"))
            waiting.cancel()

    asyncio.run(send())
