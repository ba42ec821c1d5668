"""The whole system, on a tiny random model, while a signal stops one process of each role."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end import commands
from tests.end_to_end.test_lost_generator import (
    children_of,
    contains,
    folder,
    is_alive,
    launched,
    restarts,
    wait_until,
)

pytestmark = [pytest.mark.slow(300), pytest.mark.exhaustive, pytest.mark.timeout(580)]

__all__ = ["folder"]
STOPPED_S = 3
# Answers are graded by grading processes; restarts are never used up.
GIVEN = [
    f"expert.queue.heartbeat_timeout_s={STOPPED_S}", "reward.tasks.any_text.compare=math",
    "expert.verifier.answers.max_elapsed_s=5", "expert.train.batch_timeout_s=200",
    *(f"expert.{kind}.restart_window_s=20" for kind in ("queue", "verifier", "generator")),
]  # fmt: skip
Run = subprocess.Popen[str]
Find = Callable[[Run], psutil.Process | None]


def of_module(module: str) -> Find:
    """The process that the launcher started for a module."""
    return lambda run: next(iter(children_of(run, module)), None)


def below(find: Find, generation: int) -> Find:
    """A process so many generations below another one."""

    def found(run: Run) -> psutil.Process | None:
        process = find(run)
        for _ in range(generation):
            children = process.children() if process is not None else []
            process = children[-1] if children else None
        return process

    return found


VERIFIER, GENERATOR = of_module("verification.worker"), of_module("generation.worker")
TORCHRUN = of_module("megatron_rl.trainer.torchrun")
# Kind whose restart is counted, and the process. "": its work goes to others of its kind.
ROLES = {
    "queue": ("queue", of_module("megatron_rl.rollout_queue.server")),
    "verifier": ("verifier", VERIFIER),
    "fork server": ("verifier", below(VERIFIER, 1)),
    "grading process": ("", below(VERIFIER, 2)),
    "SGLang": ("generator", below(GENERATOR, 1)),
    "SGLang's child": ("generator", below(GENERATOR, 2)),
    "generator": ("generator", GENERATOR),
}


def steps(run_dir: Path) -> int:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return sum("train/loss" in row for row in rows)


def test_training_outlives_a_stop_of_any_process(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run_dir, count = tmp_path / "run", 1000
    given = [*GIVEN, f"train.steps={count}", "generator.engine=sglang", "metrics.tensorboard=true"]
    with launched(folder, "run", run_dir, *given) as run:
        wait_until(lambda: contains(run_dir / "metrics.jsonl", "train/loss"), run)
        metrics = of_module("megatron_rl.observe.exporters.exporter")(run)
        assert metrics is not None
        os.kill(metrics.pid, signal.SIGSTOP)
        for kind, find in ROLES.values():
            wait_until(lambda find=find: find(run) is not None, run)
            process = find(run)
            assert process is not None
            before = len(restarts(run_dir, kind))
            os.kill(process.pid, signal.SIGSTOP)
            if kind:
                wait_until(lambda process=process: not is_alive(process), run)
                wait_until(lambda k=kind, n=before: len(restarts(run_dir, k)) > n, run)
                assert "stopped by SIGSTOP for" in restarts(run_dir, kind)[-1]["why"]
            trained = steps(run_dir)
            wait_until(lambda n=trained: steps(run_dir) > n + 1, run)
        assert not is_alive(metrics)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 128 + signal.SIGTERM, output
    with commands.launched("audit", run_dir) as audit:
        found, _ = audit.communicate(timeout=200)
    assert audit.returncode == 0, found


TRAINER = [(0, "its first process"), (1, "rank 0")]


def stop_trainer(run: Run, generation: int) -> psutil.Process:
    """Stop torchrun or its rank."""
    find = below(TORCHRUN, generation)
    wait_until(lambda: find(run) is not None, run)
    process = find(run)
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    return process


def test_a_stopped_trainer_is_restarted(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    run_dir = tmp_path / "run"
    with launched(folder, "run", run_dir, *GIVEN, "train.steps=1000") as run:
        for count, (generation, name) in enumerate(TRAINER):
            wait_until(lambda n=count: steps(run_dir) > n, run)
            process = stop_trainer(run, generation)
            wait_until(lambda n=count: len(restarts(run_dir, "trainer")) > n, run)
            why = restarts(run_dir, "trainer")[-1]["why"]
            assert why.startswith(f"{name} (pid {process.pid}) was stopped by SIGSTOP for")
        trained = steps(run_dir)
        wait_until(lambda: steps(run_dir) > trained, run)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 128 + signal.SIGTERM, output


def test_a_stopped_rank_that_cannot_be_restarted_ends_the_run(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    # Without a ledger a trainer does not get its batches again.
    given = [*GIVEN, "expert.queue.ledger=false", "train.steps=1000"]
    with launched(folder, "run", tmp_path / "run", *given) as run:
        wait_until(lambda: contains(tmp_path / "run/metrics.jsonl", "train/loss"), run)
        process = stop_trainer(run, 1)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 1
    assert f"rank 0 (pid {process.pid}) was stopped by SIGSTOP for" in output.replace("\n", " ")
    assert not is_alive(process)
