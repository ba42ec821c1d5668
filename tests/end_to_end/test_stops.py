"""The whole system, on a tiny random model, asked to stop in every phase."""

import signal
from pathlib import Path

import pytest

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end.test_lost_generator import STEPS, contains, folder, launched, wait_until

pytestmark = [pytest.mark.slow(170), pytest.mark.exhaustive, pytest.mark.timeout(600)]

__all__ = ["folder"]
# Evaluations take a while.
EVALUATES = ["eval.prompts=200", "eval.samples=10", "expert.eval.timeout_s=300"]


def labels(run_dir: Path) -> list[str]:
    return [row["label"] for row in read_jsonl(run_dir / "metrics.jsonl") if "eval/n" in row]


def test_a_stop_after_the_last_batch_is_saved_and_resumed_at_the_last_evaluation(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    with launched(folder, "run", run_dir, *EVALUATES) as run:
        wait_until(lambda: contains(run_dir / "logs/queue.log", f"batch of step {STEPS - 1}:"), run)
        run.send_signal(signal.SIGHUP)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 128 + signal.SIGHUP, output
    assert f"resumes the run after step {STEPS} of {STEPS}" in output.replace("\n", " ")
    assert labels(run_dir) == ["before"]
    with launched(folder, "run", run_dir, *EVALUATES) as run:
        # Any node may ask, also when nothing is trained.
        wait_until(lambda: contains(run_dir / "alive.json", "after the last step"), run)
        (run_dir / "stop").touch()
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 128 + signal.SIGTERM, output
    with launched(folder, "run", run_dir, *EVALUATES) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert labels(run_dir) == ["before", "after"]
    assert sum("train/loss" in row for row in read_jsonl(run_dir / "metrics.jsonl")) == STEPS
