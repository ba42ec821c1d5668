"""A stall of the queue's own loop is nobody else's silence: real sockets, many generators."""

import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zmq

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    Cancel,
    GeneratorReady,
    Lease,
    NextBatch,
    Rollout,
    RolloutDone,
    VersionSpan,
    WeightsSynced,
)  # fmt: skip
from megatron_rl.protocol.wire import Router, decode_frames, encode_frames
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, Coordinator
from megatron_rl.rollout_queue.server import serve
from megatron_rl.rollout_queue.stall import STALL_S, LoopClock, UnixTime
from tests.ports import free_port
from tests.rollout_queue.virtual import open_coordinator

GENERATORS = 200
SLOTS = 4
TOKENS = 9_000
HEARTBEAT_S = 0.5
START_S = 30.0
"""All generators must be there by then."""


def test_clock_leaves_out_what_exceeds_a_pass_of_the_loop() -> None:
    times = iter([100.0, 101.0, 102.5, 170.5, 171.0])
    clock = LoopClock(lambda: next(times))
    # From 102.5 to 170.5 is 68 s, of which STALL_S count.
    assert [clock.read() for _ in range(4)] == [101.0, 102.5, 104.5, 105.0]
    assert STALL_S == 2.0 and clock.stalled_s == 66.0


def test_recorded_times_follow_the_time_of_day_after_a_suspension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger writes the new offset down. Small corrections of the time change nothing."""
    monotonic, unix = 100.0, 5000.0
    monkeypatch.setattr(time, "time", lambda: unix)
    clock = LoopClock(lambda: monotonic)
    recorded = UnixTime()
    recorded.clock = clock
    for asleep_s, offset_s in [(0.0, 4900.0), (28_800.0, 33_700.0), (1.5, 33_700.0)]:
        monotonic += 1.0
        unix += 1.0 + asleep_s
        assert recorded(clock.read()) == monotonic + offset_s
        assert recorded.present_offset_s == offset_s
    # A stall of 4 s, of which 2 s are left out, and a clock that is put back by an hour.
    monotonic += 4.0
    unix += 4.0 - 3600.0
    assert recorded(clock.read()) == unix
    assert clock.stalled_s == 2.0


class Generators:
    """Many DEALERs in one thread: each says Ready, and answers its leases once it may.

    So long rollouts are what each one says first in a stall: one pass of the loop reads a part.
    """

    def __init__(self, port: int) -> None:
        self.context = zmq.Context()
        self.sockets = []
        for number in range(GENERATORS):
            socket = self.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, f"generator-{number}".encode())
            socket.connect(f"tcp://127.0.0.1:{port}")
            self.sockets.append(socket)
        self.heard: Counter[str] = Counter()
        self.sent = 0
        self.is_over, self.may_answer = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        ready_at, answers = 0.0, []
        while not self.is_over.is_set():
            now = time.monotonic()
            if now >= ready_at:
                ready_at = now + HEARTBEAT_S
                for socket in self.sockets:
                    socket.send_multipart(encode_frames(GeneratorReady(SLOTS, 0, session=1)))
            for socket, _ in poller.poll(50):
                message = decode_frames(socket.recv_multipart())
                self.heard[type(message).__name__] += 1
                if isinstance(message, Lease):
                    answers += [(socket, message, index) for index in message.indices]
            while answers and self.may_answer.is_set():
                socket, lease, index = answers.pop(0)
                socket.send_multipart(encode_frames(RolloutDone(make_long(lease, index))))
                self.sent += 1

    def close(self) -> None:
        self.is_over.set()
        self.thread.join(60)
        self.context.destroy(linger=0)


def make_long(lease: Lease, index: int) -> Rollout:
    return Rollout(
        lease.lease_id, index, np.arange(5, dtype=np.int32), np.arange(TOKENS, dtype=np.int32),
        np.zeros(TOKENS, np.float32), [VersionSpan(0, 0, TOKENS)], "stop", "x",
    )  # fmt: skip


def stall_once(
    coordinator: Coordinator, generators: Generators, *, stall_s: float, end_s: float
) -> list[int]:
    """The loop stands still once, when all generators are there; it ends end_s later.

    Returns the counts of live generators from then on.
    """
    over_at, live = time.monotonic() + START_S, []
    tick = coordinator.tick

    def stalling(now: float, *, has_heard_all: bool = True) -> None:
        nonlocal over_at
        tick(now, has_heard_all=has_heard_all)
        if live or len(coordinator._leases.generators) == GENERATORS:
            live.append(len(coordinator._leases.generators))
        if len(live) == 2:
            generators.may_answer.set()
            time.sleep(stall_s)
            over_at = time.monotonic() + end_s
        coordinator.is_over = time.monotonic() > over_at

    coordinator.tick = stalling
    return live


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stall_s", "heartbeat_timeout_s"),
    [(7.0, 6.0), pytest.param(60.0, 30.0, marks=pytest.mark.exhaustive)],
)
def test_a_stall_of_the_queue_costs_no_generator(
    tmp_path: Path, stall_s: float, heartbeat_timeout_s: float
) -> None:
    port, batches = free_port(), free_port()
    with (
        open_coordinator(
            tmp_path,
            train={"steps": 4, "prompts_per_batch": 400, "group_size": 8},
            queue={"heartbeat_timeout_s": heartbeat_timeout_s, "max_staleness": 0},
        ) as coordinator,
        Router("127.0.0.1", port) as prompts,
        Router("127.0.0.1", batches) as trainers,
    ):
        clock = LoopClock()
        now = clock.read()
        coordinator.deadline.note_progress(now)
        coordinator._judged_at = now
        coordinator.handle(BATCHES, "t", WeightsSynced(0), now)
        coordinator.handle(BATCHES, "t", NextBatch(0, 0, 1), now)
        generators = Generators(port)
        end_s = heartbeat_timeout_s / 2
        live = stall_once(coordinator, generators, stall_s=stall_s, end_s=end_s)
        try:
            routers = {PROMPTS: prompts, BATCHES: trainers}
            serve(coordinator, routers, clock)
        finally:
            generators.close()
    assert len(live) > 2 and set(live) == {GENERATORS}, live
    assert generators.heard[Cancel.__name__] == 0
    assert generators.sent >= GENERATORS * SLOTS
    assert coordinator._leases.late_rollouts == 0
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    stalled = sum(row.get("queue/loop_stalled_s", 0.0) for row in rows)
    # A busy machine may let the loop stand still now and then.
    assert stall_s - STALL_S <= stalled < stall_s + 30
