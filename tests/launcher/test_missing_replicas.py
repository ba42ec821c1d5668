"""Which replicas the launcher takes for missing, and says to be missing."""

import io
import json
import subprocess
import time
from pathlib import Path

from rich.console import Console

from megatron_rl.config.files import load_config
from megatron_rl.launcher.live_view import LiveView
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


def test_a_scorer_that_is_down_is_named_before_what_others_wait_for(tmp_path: Path) -> None:
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    rule = RestartRule(
        "scorer-0", limit=1, window_s=1.0, until="queue", ready_path=tmp_path / "ready",
        kind="scorer",
    )  # fmt: skip
    scorer = Role("scorer-0", [], None, tmp_path / "out", 0, 0.0, restarts=rule)
    waits = {"time": time.time(), "source": "queue", "step": 1, "peers/waits": "verifier 7 grades"}
    rows = [{"time": 1.0, "source": "queue", "step": 0, "activity/seconds": 5.0}, waits]
    rows[0]["activity/rollouts_scored"] = 3
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = iter(range(0, 100, 5))
    with LiveView(config, Console(file=io.StringIO()), clock=lambda: next(seconds)) as view:

        def said() -> str:
            view.refresh({"scorer-0": scorer})
            return view.awaited

        assert said().startswith("scorer-0 starts its engine; verifier grades: ")
        rule.ready_path.touch()
        assert said().startswith("verifier grades: ")
        scorer.ended, scorer.restart_at = 1.0, 2.0
        assert said().startswith("scorer-0 is down, and restarts; verifier grades: ")
        # It has ended well.
        scorer.restart_at = None
        assert said().startswith("verifier grades: ")
