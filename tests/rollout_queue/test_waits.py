"""What each process waits for, and since when, by a clock that the test moves."""

from pathlib import Path

from megatron_rl.protocol.generator_messages import EngineActivity
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    GeneratorReady,
    Lease,
    NextBatch,
    RolloutDone,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.waits import WAITS, read_waits
from tests.rollout_queue.makers import make_rollout
from tests.rollout_queue.virtual import VERIFIER_ROOM, open_coordinator


def beat(coordinator: Coordinator, now: float, version: int, name: str = "generator-0") -> list:
    """A heartbeat of a generator and a look at the clock; the messages that follow."""
    activity = EngineActivity(idle_s=now, running=1)
    ready = GeneratorReady(2, version, session=1, activity=activity)
    coordinator.handle("prompts", name, ready, now)
    sent = list(coordinator.outgoing(now))
    coordinator.tick(now)
    return sent


def latest(run_dir: Path) -> dict[str, tuple[str, int]]:
    """Role -> (what, seconds) of the latest row."""
    row = [row for row in read_jsonl(run_dir / "metrics.jsonl") if WAITS in row][-1]
    return {one.role: (one.what, round(row["time"] - one.since_s)) for one in read_waits(row)}


def test_each_process_has_a_reason_to_wait_and_its_time(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, train={"prompts_per_batch": 1, "group_size": 2}) as queue:
        beat(queue, 0.0, -1)
        beat(queue, 6.0, -1)
        assert latest(tmp_path) == {"generator-0": ("waits for weights", 6)}
        queue.handle("batches", "trainer-0", WeightsSynced(0), 7.0)
        queue.handle("batches", "trainer-0", NextBatch(0, 0, 1), 7.0)
        queue.handle("verify", "verifier", VerifierReady(VERIFIER_ROOM, session=1), 7.0)
        leases = [one.message for one in beat(queue, 8.0, 0) if isinstance(one.message, Lease)]
        beat(queue, 20.0, 0)
        assert latest(tmp_path) == {
            "generator-0": ("generates", 12),
            "verifier": ("waits for completions", 12),
            "trainer-0": ("waits for the batch of step 1", 12),
        }
        # A completion is progress of the generator, and work for the verifier.
        done = RolloutDone(make_rollout(0, lease_id=leases[0].lease_id))
        queue.handle("prompts", "generator-0", done, 21.0)
        beat(queue, 21.0, 0)
        beat(queue, 29.0, 0)
        assert latest(tmp_path) == {
            "generator-0": ("generates", 8),
            "verifier": ("grades", 8),
            "trainer-0": ("waits for the batch of step 1", 21),
        }
