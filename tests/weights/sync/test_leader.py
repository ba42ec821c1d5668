"""Calls of the leader: none without senders, new groups after a failure, no keys that stay."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import torch

from megatron_rl.protocol.types import Ack, Fence, Receive
from megatron_rl.protocol.wire import Dealer
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.orders import Call, Ready, Report, key
from megatron_rl.weights.sync.leader import ExchangeSettings, Leader, _base
from tests.weights.sync.test_link import WAIT_S, Peers

SETTINGS = ExchangeSettings(
    "127.0.0.1", "gloo", torch.float32, bucket_bytes=1024, deadline_s=0.5, name="weights-0"
)


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["", None], "no sender came before the deadline (expert.weights.deadline_s)"),
        (["", "rank 1 has no room"], "rank 1 has no room"),
    ],
    ids=["silent", "unable"],
)
def test_no_transfer_without_all_senders(peers: Peers, said: list[str | None], reason: str) -> None:
    store = open_store("127.0.0.1", 0, is_master=True, timeout_s=WAIT_S)
    dealer = peers.join("a")
    for rank, text in enumerate(said):
        if text is not None:
            store.set(key("prepared", 0, rank), text)
    leader = Leader(peers.link, store, SETTINGS, trainer_ranks=2)
    calls: list[str] = []
    outcome = leader.lead(
        {"a": peers.link.peers["a"]}, {"a": 0}, version=3, then=lambda: calls.append("then")
    )
    assert not calls
    assert outcome.failed == {"a": f"a: {reason}"}
    # Neither paused nor asked to receive; and the senders that came need not wait.
    assert dealer.receive(WAIT_S) == Fence(f"a: {reason}")
    assert msgspec.json.decode(store.get(key("go", 0)), type=Call).is_end


def obey(dealer: Dealer, port: int, errors: dict[int, str], calls: list[Call]) -> None:
    """An engine of one rank, until it is fenced; errors: of its attempts. Notes the calls."""
    store = open_store("127.0.0.1", port, is_master=False, timeout_s=WAIT_S)
    while not isinstance(message := dealer.receive(WAIT_S), Fence):
        assert message is not None
        if isinstance(message, Receive):
            of = (message.attempt, message.replica, 0)
            store.set(key("ready", *of), msgspec.json.encode(Ready()))
            go = store.get(key("go", message.attempt))
            calls.append(msgspec.json.decode(go, type=Call))
            report = Report(errors.get(message.attempt, ""))
            store.set(key("done", *of), msgspec.json.encode(report))
        dealer.send(Ack(type(message).__name__))


def test_a_failure_gets_a_new_group_and_no_weight_sync_leaves_keys_behind(peers: Peers) -> None:
    store = open_store("127.0.0.1", 0, is_master=True, timeout_s=WAIT_S)
    dealer, calls, ends, kept = peers.join("a"), list[Call](), list[int](), list[int]()
    # The second weight sync: attempt 1 was the call that ended the first.
    errors = {2: "scripted"}
    leader = Leader(peers.link, store, replace(SETTINGS, deadline_s=WAIT_S), trainer_ranks=1)
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(obey, dealer, store.port, errors, calls)
        number = 0
        for version in range(8):
            store.set(key("prepared", number, 0), "")
            then = partial(ends.append, version)
            outcome = leader.lead(dict(peers.link.peers), {"a": 0}, version, then)
            assert outcome.failed == {}
            kept.append(store.num_keys())
            # The transfers of this weight sync, and the call that ends it.
            number = len(calls) + version + 1
        peers.link.tell("a", Fence(""))
        engine.result(WAIT_S)
    assert [call.version for call in calls] == [0, 1, 1, 2, 3, 4, 5, 6, 7]
    assert len({call.group for call in calls[:2]}) == len({call.group for call in calls[2:]}) == 1
    assert calls[1].group != calls[2].group
    assert ends == list(range(8)) and kept[2:] == [kept[0]] * 6


def test_most_generators_hold_the_base_and_the_newest_of_as_many() -> None:
    found = [_base(held) for held in ([1, 1, 2], [1, 2], [-1, -1, 2], [-1], [])]
    assert found == [1, 2, 2, -1, -1]
