"""Batches are dealt in a thread: the same batches, no error lost, and the loop stays awake."""

import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.tree import Config
from megatron_rl.protocol.rollout_files import read_arrays
from megatron_rl.protocol.sequence_cost import TOKENS
from megatron_rl.protocol.types import MinibatchShare, NextBatch, RankBatch, SaveState
from megatron_rl.protocol.wire import WireError, encode_frames
from megatron_rl.rollout_queue import replay
from megatron_rl.rollout_queue.batch_thread import BatchMaker, BatchThread
from megatron_rl.rollout_queue.batches import BatchOrder, fill_minibatch, order_batch
from megatron_rl.rollout_queue.coordinator import BATCHES
from megatron_rl.rollout_queue.groups import DroppedGroups
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import make_group, make_score
from tests.rollout_queue.played_queue import PlayedQueue

DEADLINE_S = 30.0


def order_of(groups: int, members: int, step: int = 0, *, dp_size: int = 4) -> BatchOrder:
    chance = random.Random(step)
    stage = Config.model_validate(
        {"train": {"minibatches": 2, "microbatch_tokens": 32_768, "prompts_per_batch": groups}}
    )
    made = [
        make_group(
            number,
            [float(chance.random() < 0.5) for _ in range(members)],
            tokens=[chance.randint(10, 4_000) for _ in range(members)],
        )
        for number in range(groups)
    ]
    return order_batch(
        step,
        made,
        dropped=DroppedGroups(),
        stage=stage,
        advantage_functions=find_advantage_functions(stage.algorithm),
        dp_size=dp_size,
        cost=TOKENS,
    )


def await_batch(maker: BatchMaker) -> list[RankBatch]:
    until = time.monotonic() + DEADLINE_S
    while not maker.look():
        assert time.monotonic() < until
        time.sleep(0.001)
    return maker.batch


def as_bytes(batch: list[RankBatch]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in encode_frames(share)] for share in batch]


class Gate:
    """Reads and deals once it is open; notes in which thread."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.threads: set[int] = set()

    def fill(self, *planned: Any) -> list[MinibatchShare]:
        self._pass()
        return fill_minibatch(*planned)

    def read(self, *record: Any) -> tuple[np.ndarray, ...]:
        self._pass()
        return read_arrays(*record)

    def _pass(self) -> None:
        self.threads.add(threading.get_ident())
        # The loop would wait for itself.
        if threading.current_thread() is not threading.main_thread():
            self.open.wait(DEADLINE_S)


def test_a_thread_deals_the_batches_that_the_caller_would_deal() -> None:
    orders = [order_of(6, 5, step) for step in range(4)]
    at_once, gate = BatchMaker(), Gate()
    gate.open.set()
    with BatchThread(gate.fill) as thread:
        for order in orders:
            at_once.put(order)
            thread.put(order)
            assert at_once.is_busy and thread.is_busy
            expected, found = await_batch(at_once), await_batch(thread)
            assert as_bytes(found) == as_bytes(expected)
            assert len(expected) == 4 and expected[0].step == order.step
            assert not at_once.is_busy and not thread.is_busy and not thread.look()
    assert gate.threads and threading.get_ident() not in gate.threads


def test_the_loop_stays_awake_while_a_large_batch_is_dealt() -> None:
    order = order_of(512, 16)
    ratios = []
    # A busy machine may hold up one try.
    for _ in range(3):
        began = time.monotonic()
        BatchMaker().put(order)
        in_loop_s = time.monotonic() - began
        passes = [time.monotonic()]
        with BatchThread() as thread:
            thread.put(order)
            while not thread.look():
                time.sleep(0.001)
                passes.append(time.monotonic())
                assert passes[-1] < began + DEADLINE_S
        ratios.append(max(after - before for before, after in pairwise(passes)) / in_loop_s)
        if ratios[-1] < 1 / 3:
            return
    pytest.fail(f"the latest pass of the loop, over the seconds of dealing: {ratios}")


def test_a_batch_is_stored_before_any_rank_can_get_it() -> None:
    stored: list[list[RankBatch]] = []
    with BatchThread(store=stored.append) as thread:
        for step in range(3):
            thread.put(order_of(2, 2, step))
            assert as_bytes(await_batch(thread)) == as_bytes(stored[step])


def test_what_dealing_raises_is_raised_in_the_loop() -> None:
    def fails(*planned: Any) -> list[MinibatchShare]:
        raise ValueError("an advantage estimator of a user")

    with BatchThread(fails) as thread:
        thread.put(order_of(2, 2))
        with pytest.raises(ValueError, match="estimator of a user"):
            await_batch(thread)


def test_the_end_does_not_wait_for_ever_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rollout_queue.batch_thread.CLOSE_S", 0.1)
    gate = Gate()
    thread = BatchThread(gate.fill)
    thread.put(order_of(2, 2))
    began = time.monotonic()
    thread.close()
    assert 0.1 <= time.monotonic() - began < DEADLINE_S / 2
    gate.open.set()
    assert len(await_batch(thread)) == 4


@pytest.mark.parametrize("held_up", ["dealing", "reading"])
def test_peers_are_served_and_nothing_is_formed_twice_while_a_batch_is_dealt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_up: str
) -> None:
    gate = Gate()
    Recorder(tmp_path / "old").write_step(0, [make_group(n, [1.0, 0.0]) for n in range(4)], 5.0)
    fill = gate.fill
    if held_up == "reading":
        # The file system of the run that is replayed is slow.
        monkeypatch.setattr(replay, "read_arrays", gate.read)
        fill = fill_minibatch
    with BatchThread(fill) as thread:
        queue = PlayedQueue(
            tmp_path / "new",
            lambda _, index: make_score(float(index % 2)),
            maker=thread,
            train={"prompts_per_batch": 4},
            replay={"share": 0.5, "runs": [tmp_path / "old"]},
        )
        coordinator = queue.coordinator
        queue.start()
        while not coordinator.is_dealing:
            queue.play(1)
            assert queue.now < 1010.0
        assert "a batch is being dealt to ranks" in coordinator.describe(queue.now)
        answered = len(queue.graded)
        # Its trainer asks again, as of a message that was lost; generators get leases.
        coordinator.handle(BATCHES, "t", NextBatch(0, 0, 1), queue.now)
        queue.play(2)
        assert len(queue.graded) > answered and not queue.batches
        # A checkpoint of now would lose the groups of the batch.
        with pytest.raises(WireError, match="saves step 0, but 1 batches are built"):
            coordinator.handle(BATCHES, "t", SaveState(0), queue.now)
        gate.open.set()
        until = time.monotonic() + DEADLINE_S
        while coordinator.is_dealing:
            queue._send()
            assert time.monotonic() < until
        assert [batch.step for batch in queue.batches] == [0]
        # Asked again, as of an answer that was lost.
        coordinator.handle(BATCHES, "t", NextBatch(0, 0, 1), queue.now)
        queue._send()
        assert [batch.step for batch in queue.batches] == [0, 0]
        assert queue.batches[0].metrics["queue/replayed_groups"][0] == 2
        assert gate.threads and threading.get_ident() not in gate.threads
