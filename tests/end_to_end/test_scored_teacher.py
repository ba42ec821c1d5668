"""Whole runs whose reference is in an engine: learning from a teacher, and the scorer's death."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end import commands

pytestmark = [pytest.mark.slow(400), pytest.mark.exhaustive, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_S = 400
ENGINE = "algorithm.reference.source=engine"
SAMPLED = ["algorithm.preset=distill", "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"]
# Wider samples and a lower rate than with whole distributions: a sampled token says little.
LEARNING = [
    "train.prompts_per_batch=32",
    "train.group_size=8",
    "optimizer.lr=1e-4",
    "train.steps=25",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, digits to sort, SFT examples of which many are wrong."""
    folder = tmp_path_factory.mktemp("teacher")
    for command in (
        ["tools.make_tiny_model", folder / "model"],
        [
            "tools.make_tasks",
            "sort",
            folder / "tasks",
            "--sft-examples",
            "500",
            "--wrong-share",
            "0.6",
        ],
    ):
        done = [sys.executable, "-m", *map(str, command), "--seed", "0"]
        subprocess.run(done, cwd=ROOT, check=True, timeout=200)
    return folder


def arguments(folder: Path, name: str, *overrides: str) -> list[str]:
    config = str(ROOT / "examples" / "tiny.toml")
    return [
        "run", "--config", config, "--run-dir", str(folder / name),
        f"model.path={model_of(folder)}",
        f"prompts.0.path={folder / 'tasks' / 'prompts.jsonl'}",
        f"sft.dataset={folder / 'tasks' / 'sft.jsonl'}", *overrides,
    ]  # fmt: skip


def model_of(folder: Path) -> str:
    """What a run starts from: the cold start, once there is one."""
    cold_start = folder / "made" / "hf" / "cold_start"
    return str(cold_start if cold_start.exists() else folder / "model")


def finish(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """Summary of a run that ended well."""
    with commands.launched(*arguments(folder, name, *overrides)) as run:
        output, _ = run.communicate(timeout=RUN_S)
    assert run.returncode == 0, output[-3000:]
    return json.loads((folder / name / "summary.json").read_text())


@pytest.fixture(scope="module")
def teacher(folder: Path) -> tuple[Path, float]:
    """A policy that learnt from rewards, and its accuracy."""
    summary = finish(folder, "made", "train.steps=25")
    return folder / "made" / "hf" / "final", summary["accuracy_after"]


def test_a_run_learns_from_its_teacher_in_an_engine(
    folder: Path, teacher: tuple[Path, float]
) -> None:
    path, accuracy = teacher
    given = [*SAMPLED, *LEARNING, "sft.steps=0", f"algorithm.reference.policy={path}", ENGINE]
    summary = finish(folder, "by_engine", *given)
    # Of 400 prompts each: the standard error of a difference is 0.03, and of sampled tokens alone
    # runs end 0.04 to 0.08 below their teacher.
    assert summary["accuracy_after"] - summary["accuracy_before"] > 0.3
    assert summary["accuracy_after"] > accuracy - 0.2
    rows = read_jsonl(folder / "by_engine" / "metrics.jsonl")
    asked = [row["scorer/requests"] for row in rows if "scorer/requests" in row]
    assert asked == [256.0] * 25
    apart = [row["train/reference_k1"] for row in rows if "train/reference_k1" in row]
    assert sum(apart[-5:]) < 0.5 * sum(apart[:5])


STOPPED_S = 10.0
"""The trainer reaches its next step meanwhile: its requests are in the scorer when that dies."""
STEPS, REQUESTS = 6, 32


def kill_scorer(run: subprocess.Popen[str], *, after_s: float) -> None:
    """Kill the scorer after it was stopped for a while: some requests wait for it then."""
    [scorer] = [
        process
        for process in psutil.Process(run.pid).children()
        if "generation.scorer" in process.cmdline()
    ]
    os.kill(scorer.pid, signal.SIGSTOP)
    time.sleep(after_s)
    os.kill(scorer.pid, signal.SIGKILL)


def has_trained(run_dir: Path) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.exists() and "train/loss" in path.read_text()


# An untrained model earns nothing, so all its groups have zero variance.
SHORT = ["sft.steps=0", "eval.prompts=0", f"train.steps={STEPS}", "algorithm.preset=grpo", ENGINE,
         "train.prompts_per_batch=4", "train.group_size=8", "parallel.tensor=1",
         "algorithm.zero_variance_groups=keep", "generator.engine=hf"]  # fmt: skip


@pytest.mark.parametrize("max_restarts", [3, 0])
def test_a_scorer_that_dies_is_started_again_or_ends_the_run(
    folder: Path, tmp_path: Path, max_restarts: int
) -> None:
    given = [*SHORT, f"expert.scorer.max_restarts={max_restarts}"]
    command = arguments(folder, "unused", *given)
    command[command.index("--run-dir") + 1] = str(tmp_path / "run")
    with commands.launched(*command) as run:
        commands.wait_until(lambda: has_trained(tmp_path / "run"), run, within_s=200)
        killed_at = time.monotonic()
        kill_scorer(run, after_s=STOPPED_S if max_restarts else 0.0)
        output, _ = run.communicate(timeout=RUN_S)
        took_s = time.monotonic() - killed_at
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    restarts = [row for row in rows if "launch/scorer_restarts" in row]
    trained = [row for row in rows if "train/reference_k1" in row]
    if max_restarts:
        assert run.returncode == 0, output[-3000:]
        assert [row["role"] for row in restarts] == ["scorer-0"]
        assert len(trained) == STEPS
        # Nothing was made up meanwhile: the steps waited, and asked again.
        assert sum(row["scorer/asked_again"] for row in trained) >= 1
        assert {row["scorer/requests"] for row in trained} == {REQUESTS}
    else:
        assert run.returncode == 1
        assert "scorer-0 ended with signal 9" in output
        assert took_s < 90.0 and restarts == [] and len(trained) < STEPS
