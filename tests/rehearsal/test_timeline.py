"""Times of events, worked by hand."""

import json

import pytest

from megatron_rl.rehearsal.events import Event
from megatron_rl.rehearsal.match import find_faults
from megatron_rl.rehearsal.timeline import EFFICIENCY, NETWORK_BYTES_PER_S, Clock, as_perfetto
from tests.rehearsal.test_match import trace

PEAK = 1e12 / EFFICIENCY
"""With which 1e12 FLOPs take a second."""
FAR = "far [0,8]"


def reduced(flops: float) -> Event:
    size = int(NETWORK_BYTES_PER_S)
    return Event(kind="all_reduce", group=FAR, bytes=size, dtype="float32", flops=int(flops))


def sent(kind: str, peer: int, flops: float) -> Event:
    size = int(2 * NETWORK_BYTES_PER_S)
    return Event(kind=kind, group=FAR, bytes=size, dtype="float32", peer=peer, flops=int(flops))


def played(*ranks: list[Event]) -> Clock:
    traces = [trace(number, *events) for number, events in zip((0, 8), ranks, strict=True)]
    for each in traces:
        each.groups[FAR] = [0, 8]
        each.flops = int(3e12)
    clock = Clock(traces, PEAK)
    assert find_faults(traces, clock) == []
    clock.end()
    return clock


def test_all_wait_for_the_last_of_a_collective() -> None:
    clock = played([reduced(1e12)], [reduced(2e12)])
    first, last = clock.ranks[0], clock.ranks[8]
    # 1 s apart; two ranks send half of the bytes twice: 1 s; then 2 and 1 s of products.
    assert (first.waits, last.waits) == (1.0, 1.0)
    assert first.exchanges == last.exchanges == 1.0
    assert first.computes == last.computes == 3.0
    assert clock.seconds == 5.0


def test_a_sender_goes_on_and_a_receiver_waits_for_the_bytes() -> None:
    clock = played([sent("send", 8, 1e12)], [sent("recv", 0, 0)])
    sender, receiver = clock.ranks[0], clock.ranks[8]
    # The receiver waits 1 s for the send and takes 2 s; its products follow.
    assert (receiver.waits, receiver.exchanges) == (1.0, 2.0)
    assert sender.exchanges == 0.0 and sender.waits == 3.0
    assert clock.seconds == 6.0


def test_the_trace_for_perfetto_has_every_slice() -> None:
    found = json.loads(as_perfetto(played([reduced(1e12)], [reduced(2e12)])))["traceEvents"]
    waits = [event for event in found if event["name"] == "wait" and event["tid"] == 0]
    assert [(event["ts"], event["dur"]) for event in waits] == [(1e6, pytest.approx(1e6))]
    assert {event["args"]["name"] for event in found if event["ph"] == "M"} == {"rank 0", "rank 8"}
