"""How long the queue waits for a trainer, by a clock that the test moves."""

from pathlib import Path

import pytest

from megatron_rl.protocol.types import GeneratorReady, WeightsSynced
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.coordinator import Coordinator
from tests.rollout_queue.virtual import open_coordinator

LIMITS = {
    "train": {"batch_timeout_s": 600},
    "generator": {"start_timeout_s": 180},
    "weights": {"join_timeout_s": 300},
    "checkpoint": {"every_steps": 0},
}
IDLE_LIMIT_S = 600 + 180 + 300


def wait(coordinator: Coordinator, start_s: float, end_s: float) -> None:
    """Let time pass with nothing but a generator's heartbeats."""
    for now in range(int(start_s), int(end_s) + 1, 20):
        coordinator.handle("prompts", "g", GeneratorReady(64, -1, session=1), float(now))
        assert list(coordinator.outgoing(float(now))) == []
        coordinator.tick(float(now))


def test_a_supervised_cold_start_may_take_hours(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, **LIMITS) as coordinator:
        coordinator.deadline.await_trainer()
        wait(coordinator, 0, 4 * 3600)
        coordinator.deadline.expect_trainer(4 * 3600.0)
        wait(coordinator, 4 * 3600, 4 * 3600 + IDLE_LIMIT_S)
        with pytest.raises(DeadlineExceeded, match="nothing moved for 1100 s: version -1"):
            wait(coordinator, 4 * 3600 + IDLE_LIMIT_S, 4 * 3600 + IDLE_LIMIT_S + 20)


def test_a_trainer_that_never_comes_ends_a_run_without_a_cold_start(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, **LIMITS) as coordinator:
        wait(coordinator, 0, IDLE_LIMIT_S)
        with pytest.raises(DeadlineExceeded, match="nothing moved for"):
            wait(coordinator, IDLE_LIMIT_S, IDLE_LIMIT_S + 20)


def test_the_first_message_of_the_trainer_ends_the_cold_start_too(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, **LIMITS) as coordinator:
        coordinator.deadline.await_trainer()
        wait(coordinator, 0, 5000)
        coordinator.handle("batches", "trainer-0", WeightsSynced(0), 5000.0)
        # From here on completions are leased to nobody: the generator holds no version.
        with pytest.raises(DeadlineExceeded):
            wait(coordinator, 5000, 5000 + IDLE_LIMIT_S + 20)


def test_the_queue_waits_as_long_as_a_slow_checkpoint_may_take(tmp_path: Path) -> None:
    saving = {"checkpoint": {"every_steps": 10, "write_timeout_s": 1800}}
    with open_coordinator(tmp_path, **{**LIMITS, **saving}) as coordinator:
        wait(coordinator, 0, 600 + 1800)
        with pytest.raises(DeadlineExceeded, match="nothing moved for"):
            wait(coordinator, 2400, 2420)


def test_steps_that_a_restarted_trainer_repeats_are_progress_and_repeated_requests_are_not(
    tmp_path: Path,
) -> None:
    with open_coordinator(tmp_path, **LIMITS) as coordinator:
        coordinator._leases.limits.note_version(1)
        coordinator.handle("batches", "trainer-0", WeightsSynced(0), 0.0)
        coordinator.handle("batches", "trainer-0", WeightsSynced(1), 0.0)
        for number in range(1, 4):
            wait(coordinator, (number - 1) * 1000, number * 1000)
            reported = WeightsSynced((number + 1) % 2)
            coordinator.handle("batches", "trainer-0", reported, 1000.0 * number)
        for now in (3000.0, 3500.0, 4000.0):
            coordinator.handle("batches", "trainer-0", WeightsSynced(0), now)
            coordinator.handle("batches", "trainer-1", WeightsSynced(-1), now)
        wait(coordinator, 3000, 3000 + IDLE_LIMIT_S)
        with pytest.raises(DeadlineExceeded):
            wait(coordinator, 3000 + IDLE_LIMIT_S, 3000 + IDLE_LIMIT_S + 20)
