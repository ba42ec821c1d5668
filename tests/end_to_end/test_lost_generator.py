"""The whole system, on a tiny random model, while its generators and verifier are killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end import commands
from tests.end_to_end.commands import wait_until, write_inputs

pytestmark = [pytest.mark.slow(300), pytest.mark.exhaustive, pytest.mark.timeout(400)]

STEPS, GROUPS, GROUP_SIZE = 20, 4, 8
HELD_OUT = 600
# Any text counts, and a shorter one for more: a random model earns rewards that differ.
CONFIG = f"""
[model]
path = "FOLDER/model"
dtype = "float32"
[train]
steps = {STEPS}
prompts_per_batch = {GROUPS}
group_size = {GROUP_SIZE}
[sampling]
max_new_tokens = 24
[queue]
max_staleness = 1
[generator]
engine = "hf"
max_running = 32
kv_tokens = 4096
context_tokens = 64
[eval]
prompts = 0
samples = 1
temperature = 1.0
[reward]
length_margin_tokens = 24
[reward.tasks.any_text]
format_check = "none"
compare = "exact"
[expert]
train.batch_timeout_s = 60
weights.deadline_s = 20
eval.timeout_s = 30
[[prompts]]
path = "FOLDER/prompts.jsonl"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts and configuration."""
    folder = tmp_path_factory.mktemp("lost")
    write_inputs(folder, CONFIG, train=1000, held_out=HELD_OUT)
    return folder


@contextmanager
def launched(
    folder: Path, command: str, run_dir: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """A launcher; it and its processes are ended with the block."""
    config = folder / "config.toml"
    with commands.launched(command, "--config", config, "--run-dir", run_dir, *arguments) as run:
        yield run


def children_of(run: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    """Processes that the launcher started to run a module."""
    return [one for one in psutil.Process(run.pid).children() if module in one.cmdline()]


def kill_generator(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """Kill the generator alone; what it leaves behind."""
    [generator] = children_of(run, "generation.worker")
    left_behind = generator.children(recursive=True)
    os.kill(generator.pid, signal.SIGKILL)
    return left_behind


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def contains(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def restarts(run_dir: Path, kind: str = "generator") -> list[dict]:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [row for row in rows if f"launch/{kind}_restarts" in row]


@pytest.mark.parametrize(("engine", "processes"), [("hf", 0), ("sglang", 2)])
def test_evaluation_survives_the_death_of_its_generator(
    folder: Path, tmp_path: Path, engine: str, processes: int
) -> None:
    log = tmp_path / "run/logs/generator-0-model.out"
    changed = [
        f"eval.prompts={HELD_OUT}",
        "expert.eval.timeout_s=200",
        f"generator.engine={engine}",
    ]
    with launched(folder, "eval", tmp_path / "run", *changed) as run:
        wait_until(lambda: contains(tmp_path / "run/logs/queue.log", "starts"), run)
        time.sleep(0.5)
        left_behind = kill_generator(run)
        assert len(left_behind) >= processes
        wait_until(lambda: contains(log, "restart 1 of 3"), run)
        assert not any(is_alive(process) for process in left_behind)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    [restart] = restarts(tmp_path / "run")
    assert (restart["source"], restart["role"]) == ("launch", "generator-0-model")
    assert restart["exit_code"] == -signal.SIGKILL
    assert "warning: generator-0-model ended with signal 9" in output
    assert contains(tmp_path / "run/logs/queue.log", "leasing completions")
    records = read_jsonl(tmp_path / "run" / "rollouts" / "eval_model.jsonl")
    assert len({(record["group"], record["index"]) for record in records}) == HELD_OUT
    assert len(records) == HELD_OUT


def test_training_survives_the_death_of_its_generator(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched(folder, "run", run_dir) as run:
        wait_until(lambda: contains(run_dir / "metrics.jsonl", "train/loss"), run)
        kill_generator(run)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    check_trained(run_dir, STEPS)
    assert len(restarts(run_dir)) == 1


def check_trained(run_dir: Path, steps: int) -> None:
    """Every step was taken, on rollouts that were each trained on once."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["generator_restarts"] == len(restarts(run_dir))
    assert summary["steps"] == steps
    records = [
        record
        for path in (run_dir / "rollouts").glob("step_*.jsonl")
        for record in read_jsonl(path)
    ]
    assert len(records) == steps * GROUPS * GROUP_SIZE == summary["rollouts_trained"]
    assert len({(record["group"], record["index"]) for record in records}) == len(records)


QUEUE_KILLS, QUEUE_STEPS = 4, 30
KILLS = 5
MANY_STEPS = 80
"""They last longer than the kills."""


def test_training_survives_five_deaths_of_its_verifier_and_five_of_its_generators(
    folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # The window keeps the pauses short, and lets no generator be given up.
    given = [f"train.steps={MANY_STEPS}", "generator.replicas=2",
             "expert.generator.max_restarts=5", "expert.generator.restart_window_s=5",
             "expert.verifier.restart_window_s=5"]  # fmt: skip
    with launched(folder, "run", run_dir, *given) as run:
        wait_until(lambda: contains(run_dir / "metrics.jsonl", "train/loss"), run)
        for number in range(KILLS):
            for kind, module in (
                ("verifier", "verification.worker"),
                ("generator", "generation.worker"),
            ):
                wait_until(lambda module=module: bool(children_of(run, module)), run)
                os.kill(children_of(run, module)[0].pid, signal.SIGKILL)
                wait_until(lambda kind=kind: len(restarts(run_dir, kind)) > number, run)  # noqa: B023
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert len(restarts(run_dir)) == len(restarts(run_dir, "verifier")) == KILLS
    check_trained(run_dir, MANY_STEPS)
    with commands.launched("audit", run_dir) as audit:
        found, _ = audit.communicate(timeout=200)
    assert audit.returncode == 0, found


def test_training_survives_deaths_of_its_queue_without_generating_anything_twice(
    folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = [f"train.steps={QUEUE_STEPS}", "eval.prompts=20", "eval.every_steps=10",
             "expert.queue.restart_window_s=5"]  # fmt: skip
    with launched(folder, "run", run_dir, *given) as run:
        wait_until(lambda: contains(run_dir / "metrics.jsonl", "train/loss"), run)
        for number in range(QUEUE_KILLS):
            wait_until(lambda: contains(run_dir / "logs/queue.ready", ""), run)
            time.sleep(0.3 * number)
            [queue] = children_of(run, "megatron_rl.rollout_queue.server")
            os.kill(queue.pid, signal.SIGKILL)
            wait_until(lambda: len(restarts(run_dir, "queue")) > number, run)  # noqa: B023
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert len(restarts(run_dir, "queue")) == QUEUE_KILLS
    check_trained(run_dir, QUEUE_STEPS)
    log = (run_dir / "logs/queue.log").read_text()
    assert log.count("the queue continues after its death") == QUEUE_KILLS
    # No completion was leased a second time: those in flight were kept and confirmed later. A
    # verdict that was on its way is lost.
    assert "leasing completions" not in log
    labels = [row["label"] for row in read_jsonl(run_dir / "metrics.jsonl") if "eval/n" in row]
    assert labels == ["before", "step_10", "step_20", "after"]
    assert not list((run_dir / "ledger").iterdir())
    with commands.launched("audit", run_dir) as audit:
        found, _ = audit.communicate(timeout=200)
    assert audit.returncode == 0, found


def test_engine_that_cannot_be_started_ends_the_run_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The launcher can import it, and so begins.
    source = "def Engine(setup):\n    import nowhere\n"
    (tmp_path / "late_engine.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = "generator.engine=late_engine:Engine"
    with launched(folder, "run", tmp_path / "run", engine) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "generator-0 ended with exit code 1; not restarted" in output
    assert "No module named 'nowhere'" in output
    assert restarts(tmp_path / "run") == []
