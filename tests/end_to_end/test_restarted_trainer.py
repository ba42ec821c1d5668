"""The whole system, on a tiny random model, while its trainer is killed."""

import os
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from megatron_rl.protocol.metrics import read_jsonl, stream_rows
from megatron_rl.protocol.stored_batches import BATCHES, stored_steps
from tests.end_to_end import commands
from tests.end_to_end.test_lost_generator import (
    check_trained,
    contains,
    folder,
    launched,
    restarts,
    wait_until,
)

pytestmark = [pytest.mark.slow(200), pytest.mark.exhaustive, pytest.mark.timeout(600)]

STEPS, EVERY, KEPT = 10, 4, 3
KILLED_IN = (3, 7, 8)
SAME = ("train/loss", "train/grad_norm", "train/logprob_gap", "rollout/reward")
__all__ = ["folder"]


def processes_of(run: subprocess.Popen[str], module: str, *, without: str) -> list[psutil.Process]:
    found = psutil.Process(run.pid).children(recursive=True)
    lines = [(process, process.cmdline()) for process in found]
    return [process for process, line in lines if module in line and without not in line]


def kill_rank(run: subprocess.Popen[str]) -> None:
    torchrun = "megatron_rl.trainer.torchrun"
    ranks = processes_of(run, "megatron_rl.trainer.train", without=torchrun)
    os.kill(ranks[-1].pid, signal.SIGKILL)


def kill_torchrun(run: subprocess.Popen[str]) -> None:
    [torchrun] = processes_of(run, "megatron_rl.trainer.torchrun", without="nothing")
    os.kill(torchrun.pid, signal.SIGKILL)


def taken(run_dir: Path) -> list[dict]:
    """Rows of all optimizer steps, repeated ones too."""
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.parametrize("given", [["parallel.tensor=2"], ["parallel.data=2"]], ids=["tp2", "dp2"])
def test_killed_trainer_repeats_the_steps_since_its_checkpoint_on_the_same_batches(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    given: list[str],
) -> None:
    run_dir = tmp_path / "run"
    given = [*given, f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}",
             "expert.train.restart_window_s=5", "train.deterministic=true",
             f"checkpoint.keep_last={KEPT}"]  # fmt: skip
    with launched(folder, "run", run_dir, *given) as run:
        for number, step in enumerate(KILLED_IN):
            wait_until(lambda step=step: any(r["step"] >= step for r in taken(run_dir)), run)
            (kill_torchrun if number == 1 else kill_rank)(run)
            count = number + 1
            wait_until(lambda count=count: len(restarts(run_dir, "trainer")) == count, run)
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    check_repeated(run_dir)
    check_trained(run_dir, STEPS)
    # Nobody else noticed it, and nothing was generated again.
    assert not restarts(run_dir) + restarts(run_dir, "queue") + restarts(run_dir, "verifier")
    assert not contains(run_dir / "logs/queue.log", "leasing completions")
    # What the checkpoints of steps 4, 8 and 10 need.
    assert stored_steps(run_dir / BATCHES) == list(range(EVERY * (STEPS // EVERY - 1), STEPS))
    with commands.launched("audit", run_dir) as audit:
        found, _ = audit.communicate(timeout=200)
    assert audit.returncode == 0, found
    check_replay(run_dir, "one", first=6)
    if "parallel.data=2" in given:
        # From the checkpoint of another layout, with shares dealt for other ranks.
        check_replay(run_dir, "two", "parallel.data=1", "parallel.pipeline=2", first=5)


def check_replay(run_dir: Path, name: str, *given: str, first: int) -> None:
    """A replay of five steps has the figures of the run, up to rounding by another layout."""
    steps = ["--step", first, "--to", first + 4, "--out", run_dir / name]
    with commands.launched("replay", run_dir, *steps, *given) as replay:
        found, _ = replay.communicate(timeout=200)
    assert replay.returncode == 0, found
    assert given or "5 of 5 steps equal the recorded ones" in found
    recorded = {row["step"]: row for row in stream_rows(run_dir / "metrics.jsonl")
                if "train/loss" in row}  # fmt: skip
    repeated = [row for row in taken(run_dir / name) if row["step"] >= first]
    assert [row["step"] for row in repeated] == list(range(first, first + 5))
    for row in repeated:
        for figure, equal in (("train/loss", 1e-6), ("train/grad_norm", 1e-5)):
            assert row[figure] == pytest.approx(recorded[row["step"]][figure], rel=equal)


def check_repeated(run_dir: Path, steps: int = STEPS) -> None:
    """Steps were repeated, with the same figures; readers of the run see each once."""
    by_step = defaultdict(list)
    for row in taken(run_dir):
        by_step[row["step"]].append([row.get(name, 0.0) for name in SAME])
    assert len(taken(run_dir)) > steps
    for rows in by_step.values():
        assert all(row == pytest.approx(rows[0], rel=1e-6) for row in rows)
    rows = [row for row in stream_rows(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
