"""Rank 0's conversation with generators, over real sockets."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron_rl.protocol.types import Ack, AnyMessage, Failed, Hello, Pause, Resume
from megatron_rl.protocol.wire import DeadlineExceeded, Dealer, Router
from megatron_rl.weights.sync.link import GeneratorLink
from tests.ports import free_port

WAIT_S = 30.0


class Peers:
    """A link and generators by name."""

    def __init__(self, stack: ExitStack) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._stack = stack
        self.link = GeneratorLink(stack.enter_context(Router("127.0.0.1", port)))

    def join(self, name: str, session: int = 1) -> Dealer:
        dealer = self._stack.enter_context(Dealer(self.address, name))
        dealer.send(Hello(1, "scripted", "1", session=session))
        ends_at = time.monotonic() + WAIT_S
        while self.link.peers.get(name, Hello(0, "", "")).session != session:
            assert time.monotonic() < ends_at
            self.link.listen(0.1)
        return dealer


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


def answer(dealer: Dealer, *replies: AnyMessage) -> threading.Thread:
    """Answer the next message; join the thread before another one uses the dealer."""

    def work() -> None:
        assert dealer.receive(WAIT_S) is not None
        for reply in replies:
            dealer.send(reply)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def soon() -> float:
    return time.monotonic() + WAIT_S


class GeneratorLost(Exception):
    """Why a link gives a generator up."""


def tell(link: GeneratorLink, peer: str, message: AnyMessage) -> None:
    """Send a message. Raises GeneratorLost."""
    if reason := link.tell(peer, message):
        raise GeneratorLost(reason)


def ask(link: GeneratorLink, peer: str, message: AnyMessage, ends_at: float) -> None:
    """Send a message and wait for its Ack. Raises GeneratorLost."""
    tell(link, peer, message)
    if lost := link.await_acks([peer], message, lambda: ends_at):
        raise GeneratorLost(lost[peer])


def test_a_request_ends_with_its_own_ack(peers: Peers) -> None:
    dealer = peers.join("a")
    thread = answer(dealer, Ack("Resume"), Ack("Pause"))
    ask(peers.link, "a", Pause(), soon())
    thread.join()
    # The ack of another message that came before this one was sent does not count.
    started = time.monotonic()
    with pytest.raises(GeneratorLost, match="a: it did not answer Resume before the deadline"):
        ask(peers.link, "a", Resume(3), time.monotonic() + 0.3)
    assert 0.3 <= time.monotonic() - started < 20


def test_a_failure_ends_the_wait_with_its_reason_and_begin_forgets_it(peers: Peers) -> None:
    dealer = peers.join("a")
    thread = answer(dealer, Failed("Pause", "no memory"))
    with pytest.raises(GeneratorLost, match="a failed: Pause: no memory"):
        ask(peers.link, "a", Pause(), soon())
    thread.join()
    peers.link.begin("a", 1)
    thread = answer(dealer, Ack("Pause"))
    ask(peers.link, "a", Pause(), soon())
    thread.join()


def test_what_one_generator_does_is_not_another_ones(peers: Peers) -> None:
    one, other = peers.join("a"), peers.join("b")
    thread = answer(one, Failed("Pause", "no memory"))
    other.send(Ack("Resume"))
    with pytest.raises(GeneratorLost, match="a failed"):
        ask(peers.link, "a", Pause(), soon())
    thread.join()
    thread = answer(other, Ack("Pause"))
    ask(peers.link, "b", Pause(), soon())
    thread.join()


@pytest.mark.parametrize("frames", [[b"garbage"], [b"", b"two"]])
def test_what_is_no_message_is_a_failure_of_who_sent_it(peers: Peers, frames: list[bytes]) -> None:
    one, other = peers.join("a"), peers.join("b")
    one.socket.send_multipart(frames)
    with pytest.raises(GeneratorLost, match="a failed: message: received .* frame"):
        ask(peers.link, "a", Pause(), soon())
    thread = answer(other, Ack("Pause"))
    ask(peers.link, "b", Pause(), soon())
    thread.join()


def test_a_restart_in_the_middle_is_a_failure(peers: Peers) -> None:
    dealer = peers.join("a")
    thread = answer(dealer, Hello(1, "scripted", "1", session=2))
    with pytest.raises(GeneratorLost, match="a failed: it restarted"):
        ask(peers.link, "a", Pause(), soon())
    thread.join()
    assert peers.link.peers["a"].session == 2


def test_a_restart_while_another_is_served_ends_its_turn_at_once(peers: Peers) -> None:
    first, second = peers.join("a"), peers.join("b")
    for name in "ab":
        peers.link.begin(name, 1)
    # The Hello of b's next life arrives while the link waits for a.
    thread = answer(first, Ack("Pause"))
    second.send(Hello(1, "scripted", "1", session=2))
    peers.link.listen(WAIT_S)
    ask(peers.link, "a", Pause(), soon())
    thread.join()
    peers.link.begin("b", 1)
    with pytest.raises(GeneratorLost, match="b failed: it restarted"):
        tell(peers.link, "b", Pause())
    # What was meant for the former life reached nobody; the next life need not say Hello again.
    assert second.receive(0.2) is None
    peers.link.drop("b")
    assert peers.link.peers["b"].session == 2
    peers.link.begin("b", 2)
    thread = answer(second, Ack("Pause"))
    ask(peers.link, "b", Pause(), soon())
    thread.join()


def test_a_repeated_hello_is_none(peers: Peers) -> None:
    dealer = peers.join("a")
    thread = answer(dealer, Hello(1, "scripted", "1", session=1), Ack("Pause"))
    ask(peers.link, "a", Pause(), soon())
    thread.join()
    assert peers.link.peers["a"].session == 1


def test_a_generator_that_is_gone_is_noticed_at_once(peers: Peers) -> None:
    peers.join("a").close()
    ends_at = soon()
    with pytest.raises(GeneratorLost, match="a is gone: cannot send Pause"):
        while time.monotonic() < ends_at:
            tell(peers.link, "a", Pause())
            time.sleep(0.01)


def test_a_dropped_generator_comes_back_with_its_next_hello(peers: Peers) -> None:
    dealer = peers.join("a")
    peers.link.drop("a")
    assert peers.link.peers == {}
    dealer.send(Hello(1, "scripted", "1", session=1))
    peers.link.await_peers(1, WAIT_S)
    assert list(peers.link.peers) == ["a"]


def test_missing_generators_are_a_deadline_that_says_where_to_look(peers: Peers) -> None:
    peers.join("a")
    with pytest.raises(DeadlineExceeded, match=r"1 of 2 generators .* logs/generator"):
        peers.link.await_peers(2, 0.3)
