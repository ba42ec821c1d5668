"""The whole system, on a tiny random model, while its launcher is killed and started again."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    complete_checkpoints,
    read_complete_mark,
)
from megatron_rl.protocol.endpoints import PROMPTS
from megatron_rl.protocol.frames import decode_frames
from megatron_rl.protocol.ledger import FOLDER, LOG, Received, read_entries, segment_path
from megatron_rl.protocol.metrics import CONTINUED, NODES, RESUMED, read_jsonl
from megatron_rl.protocol.types import RolloutDone
from tests.end_to_end import commands
from tests.end_to_end.test_lost_generator import (
    check_trained,
    contains,
    folder,
    is_alive,
    launched,
    wait_until,
)
from tests.end_to_end.test_restarted_trainer import EVERY, STEPS, check_repeated, taken

pytestmark = [pytest.mark.slow(200), pytest.mark.exhaustive, pytest.mark.timeout(580)]

__all__ = ["folder"]
GIVEN = [f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}", "train.deterministic=true"]
END_S = 20.0
"""Seconds within which the processes of a dead launcher end."""


def arrived(run_dir: Path) -> int:
    """Completions that have reached the queue, by its ledger alone."""
    path = segment_path(run_dir / FOLDER, 0, LOG)
    if not path.exists():
        return 0
    hears = PROMPTS.router_hears
    return sum(
        isinstance(decode_frames([*entry.frames], hears), RolloutDone)
        for entry in read_entries(path)
        if isinstance(entry.record, Received) and entry.record.endpoint == PROMPTS.name
    )


def kill_launcher(run: subprocess.Popen[str]) -> float:
    """Kill the launcher alone; all other processes end by themselves. Unix seconds after that."""
    others = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=200)
    deadline = time.monotonic() + END_S
    while left := [process for process in others if is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return time.time()


def newest_step(run_dir: Path) -> int:
    return max(complete_checkpoints(run_dir / CHECKPOINTS), default=0)


def kept(run_dir: Path, killed_at: float) -> int:
    """Recorded completions, trained on or dropped, that had arrived by then."""
    records = [
        record
        for path in (run_dir / "rollouts").glob("*_??????.jsonl")
        for record in read_jsonl(path)
    ]
    return sum(record["times"]["done"] <= killed_at for record in records)


def test_a_killed_launcher_started_again_generates_nothing_twice(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Killed before the first batch, before the first checkpoint, and after one."""
    run_dir = tmp_path / "run"
    moments = [
        lambda: arrived(run_dir) > 0,
        lambda: any(row["step"] >= EVERY - 2 for row in taken(run_dir)),
        lambda: newest_step(run_dir) and any(row["step"] > EVERY + 1 for row in taken(run_dir)),
    ]
    killed: list[tuple[float, int]] = []
    begun = [0]
    for moment in moments:
        with launched(folder, "run", run_dir, *GIVEN) as run:
            wait_until(moment, run)
            at = kill_launcher(run)
        killed.append((at, arrived(run_dir)))
        begun.append(newest_step(run_dir))
    with launched(folder, "run", run_dir, *GIVEN) as run:
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    text = output.replace("\n", " ")
    assert f"Resuming {run_dir} after step {begun[-1]} of {STEPS}, from" in text
    assert "The queue continues its ledger" in text
    assert not list(run_dir.glob("attempt_*"))
    # Each completion that had arrived was used: none of them was generated again.
    counts = [count for _, count in killed]
    assert counts[0] > 0 and counts == sorted(set(counts))
    assert [kept(run_dir, at) for at, _ in killed] == counts
    assert not contains(run_dir / "logs/queue.log", "leasing completions")
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if RESUMED in row]
    assert [(row["step"], row[CONTINUED]) for row in rows] == [(step, 1) for step in begun[1:]]
    assert begun[:3] == [0, 0, 0] and begun[3] >= EVERY
    nodes = [row[NODES] for row in read_jsonl(run_dir / "metrics.jsonl") if NODES in row]
    assert nodes == [1] * len(moments)
    check_repeated(run_dir)
    check_trained(run_dir, STEPS)
    with commands.launched("audit", run_dir) as audit:
        found, _ = audit.communicate(timeout=200)
    assert audit.returncode == 0, found
    assert not list((run_dir / FOLDER).iterdir())


def test_a_lost_checkpoint_is_rebuilt_and_resumed_from(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run_dir, given = tmp_path / "run", [*GIVEN, "parallel.tensor=2"]
    step = 2 * EVERY
    lost = run_dir / CHECKPOINTS / f"step_{step:06d}"
    with launched(folder, "run", run_dir, *given) as run:
        wait_until(
            lambda: lost.exists() and any(row["step"] > step for row in taken(run_dir)), run,
            within_s=200,
        )  # fmt: skip
        kill_launcher(run)
    begun = [row["step"] for row in taken(run_dir)]
    mark = read_complete_mark(lost)
    shutil.rmtree(lost)
    steps = ["--step", EVERY + 1, "--to", step]
    with commands.launched("replay", run_dir, *steps, "--rebuild", "--export") as replay:
        found, _ = replay.communicate(timeout=200)
    assert replay.returncode == 0, found
    [model] = run_dir.glob("replay_*/hf/*")
    assert model.name == f"step_{step:06d}" and (model / "model.safetensors").exists()
    assert re.search(rf"^Model +{model}$", found, re.M) and f"Checkpoint          {lost}" in found
    # Weights, optimizer state and the queue's state, bit for bit.
    rebuilt = read_complete_mark(lost)
    names = [name for name in mark.files if name.endswith((".distcp", ".json"))]
    assert len(names) > 2 and "queue.json" in names
    assert [rebuilt.files[name] for name in names] == [mark.files[name] for name in names]
    with launched(folder, "run", run_dir, *given) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    text = output.replace("\n", " ")
    assert f"Resuming {run_dir} after step {step} of {STEPS}, from" in text
    assert "The queue continues its ledger" in text
    assert [row["step"] for row in taken(run_dir)][len(begun) :] == [*range(step + 1, STEPS + 1)]
    check_repeated(run_dir)
    check_trained(run_dir, STEPS)
