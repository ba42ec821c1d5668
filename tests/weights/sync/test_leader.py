"""Without senders that can send, the leader calls for no transfer."""

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import torch

from megatron_rl.protocol.types import Fence
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.orders import Call, key
from megatron_rl.weights.sync.leader import ExchangeSettings, Leader
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
    outcome = leader.lead({"a": peers.link.peers["a"]}, {"a": 0}, version=3)
    assert outcome.failed == {"a": f"a: {reason}"}
    # Neither paused nor asked to receive; and the senders that came need not wait.
    assert dealer.receive(WAIT_S) == Fence(f"a: {reason}")
    assert msgspec.json.decode(store.get(key("go", 0)), type=Call).is_end
