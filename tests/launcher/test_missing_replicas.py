"""Which replicas the launcher takes for missing, from the word of the queue."""

import subprocess
import time
from pathlib import Path

from megatron_rl.launcher.node import missing_now
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.supervisor import Role


def test_a_queue_that_starts_again_accuses_nobody(tmp_path: Path) -> None:
    rule = RestartRule(
        "queue", limit=1, window_s=1.0, until="queue", ready_path=tmp_path / "queue.ready",
        kind="queue",
    )  # fmt: skip
    with subprocess.Popen(["sleep", "600"]) as process:
        queue = Role("queue", [], process, tmp_path / "queue.out", 0, 0.0, restarts=rule)
        assert missing_now([queue], ["verifier"]) == []
        rule.ready_path.touch()
        assert missing_now([queue], ["verifier"]) == ["verifier"]
        process.kill()
        queue.ended = time.monotonic()
        assert missing_now([queue], ["verifier"]) == []
    # A queue whose death ends the run is not waited for.
    only = Role("queue", [], process, tmp_path / "queue.out", 0, 0.0)
    assert missing_now([only], ["verifier"]) == ["verifier"]
