"""Deterministic synchronous runs on a tiny random model: killed anywhere, they end alike.

The queue alone among peers that die at random: tests/rollout_queue/test_exact_resume.py.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.metrics import stream_rows
from megatron_rl.protocol.rollout_files import read_rollouts
from tests.end_to_end.commands import wait_until, write_inputs
from tests.end_to_end.test_lost_generator import children_of, contains, launched, restarts
from tests.end_to_end.test_restarted_trainer import kill_rank, taken

pytestmark = [pytest.mark.slow(300), pytest.mark.exhaustive, pytest.mark.timeout(900)]

STEPS, EVERY = 8, 3
GROUPS, GROUP_SIZE = 4, 4
# A shorter text earns more. Evaluations are greedy. So few prompts that
# each run takes more than one epoch of them.
CONFIG = f"""
[model]
path = "FOLDER/model"
dtype = "float32"
[train]
steps = {STEPS}
prompts_per_batch = {GROUPS}
group_size = {GROUP_SIZE}
deterministic = true
[sampling]
max_new_tokens = 16
[queue]
max_staleness = 0
[generator]
max_running = 32
kv_tokens = 4096
context_tokens = 64
[checkpoint]
every_steps = {EVERY}
[eval]
prompts = 5
samples = 1
temperature = 0.0
every_steps = 3
[reward]
length_margin_tokens = 16
[reward.tasks.any_text]
format_check = "none"
compare = "exact"
[expert]
generator.deterministic = true
train.batch_timeout_s = 120
weights.deadline_s = 20
queue.restart_window_s = 5
generator.restart_window_s = 5
train.restart_window_s = 5
[[prompts]]
path = "FOLDER/prompts.jsonl"
"""
FIGURES = ("train/loss", "train/grad_norm", "train/logprob_gap", "rollout/reward",
           "rollout/length_tokens", "queue/groups_dropped_zero_variance")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts and configuration."""
    folder = tmp_path_factory.mktemp("exact")
    write_inputs(folder, CONFIG, train=25, held_out=5)
    return folder


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that two runs have in common, whatever happened to them."""
    rows = list(stream_rows(run_dir / "metrics.jsonl"))
    found: dict[str, Any] = {
        "figures": [
            [row["step"], *(row.get(figure) for figure in FIGURES)]
            for row in rows if "train/loss" in row or "rollout/reward" in row
        ],
        "evaluations": sorted(
            (row["label"], row["eval/accuracy"], row["eval/length_tokens"])
            for row in rows if "eval/accuracy" in row
        ),
        "model": (run_dir / "hf/final/model.safetensors").read_bytes(),
    }  # fmt: skip
    for one in read_rollouts(run_dir):
        what = [one.prompt_id, one.index, one.reward, one.text, one.seed,
                one.token_ids.tolist(), one.logprobs.tolist()]  # fmt: skip
        found.setdefault(one.source.path.name, []).append(what)
    return {name: value if name in ("figures", "model") else sorted(value)
            for name, value in found.items()}  # fmt: skip


def check_same(run_dir: Path, expected: dict[str, Any]) -> None:
    found = outcome(run_dir)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name] == value, name


def finish(run: subprocess.Popen[str]) -> None:
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output


def reached(run_dir: Path, step: int) -> bool:
    return any(row["step"] >= step for row in taken(run_dir))


def kill(run: subprocess.Popen[str], module: str) -> None:
    os.kill(children_of(run, module)[0].pid, signal.SIGKILL)


@pytest.fixture(scope="module", params=["hf", "sglang"])
def engine(request: pytest.FixtureRequest) -> str:
    return f"generator.engine={request.param}"


@pytest.fixture(scope="module")
def whole(folder: Path, engine: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of an uninterrupted run with one generator."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with launched(folder, "run", run_dir, engine) as run:
        finish(run)
    found = outcome(run_dir)
    assert [step for step, *_ in found["figures"]] == list(range(1, STEPS + 1))
    assert [label for label, *_ in found["evaluations"]] == ["after", "before", "step_3", "step_6"]
    return found


def test_run_equals_the_whole_one_after_deaths_of_generator_queue_and_trainer(
    folder: Path, tmp_path: Path, engine: str, whole: dict[str, Any]
) -> None:
    # Two generators of few slots: other completions run together.
    given = [engine, "generator.replicas=2", "generator.max_running=5"]
    run_dir = tmp_path / "run"
    with launched(folder, "run", run_dir, *given) as run:
        wait_until(lambda: reached(run_dir, 1), run)
        kill(run, "generation.worker")
        wait_until(lambda: bool(restarts(run_dir)) and reached(run_dir, 2), run)
        kill(run, "megatron_rl.rollout_queue.server")
        wait_until(lambda: bool(restarts(run_dir, "queue")) and reached(run_dir, 5), run)
        kill_rank(run)
        finish(run)
    assert len(restarts(run_dir, "trainer")) == 1
    check_same(run_dir, whole)


def test_run_whose_launcher_was_killed_resumes_to_the_whole_one(
    folder: Path, tmp_path: Path, engine: str, whole: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    with launched(folder, "run", run_dir, engine) as run:
        wait_until(lambda: reached(run_dir, EVERY + 2), run)
        run.kill()
        run.communicate(timeout=200)
    newest = max(complete_checkpoints(run_dir / CHECKPOINTS))
    assert EVERY <= newest < STEPS
    with launched(folder, "run", run_dir, engine, "generator.replicas=2") as run:
        finish(run)
    assert contains(run_dir / "logs/queue.log", f"resumed after step {newest}")
    check_same(run_dir, whole)
