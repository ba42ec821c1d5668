"""The whole system, on a tiny random model, killed after a checkpoint and started again."""

import collections
import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.metrics import RESUMED, read_jsonl, stream_rows
from tests.end_to_end.test_lost_generator import (
    GROUP_SIZE,
    GROUPS,
    STEPS,
    folder,
    launched,
    wait_until,
)

pytestmark = [pytest.mark.slow(170), pytest.mark.exhaustive, pytest.mark.timeout(600)]

PROMPTS = 45
# The run is killed in stage 2, at a checkpoint of step 6 or later.
STAGES = """
[[stages]]
at_step = 3
sampling = {max_new_tokens = 28, temperature = 0.6}
reward = {length_margin_tokens = 28}

[[stages]]
at_step = 5
sampling = {max_new_tokens = 32, temperature = 1.5}
reward = {length_margin_tokens = 16}
"""
# (first step, limit, margin) of each stage.
RULES = [(0, 24, 24), (3, 28, 28), (5, 32, 16)]
__all__ = ["folder"]


@pytest.fixture(scope="module")
def few_prompts(folder: Path) -> list[str]:  # noqa: F811
    """Overrides: so few prompts that the run takes more than one epoch of them."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    (folder / "few.jsonl").write_text("\n".join(lines) + "\n")
    config = folder / "config.toml"
    config.write_text(config.read_text() + STAGES)
    # Both starts have the same label.
    label = "expert.ports.label=mine"
    given = ["checkpoint.every_steps=3", "expert.train.max_restarts=0", label]
    return [f"prompts.0.path={folder / 'few.jsonl'}", *given]


def kill_trainer(run: subprocess.Popen[str]) -> None:
    [rank] = [
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if "megatron_rl.trainer.train" in process.cmdline()
        and "megatron_rl.trainer.torchrun" not in (process.cmdline())
    ]
    os.kill(rank.pid, signal.SIGKILL)


def kill_run(run: subprocess.Popen[str]) -> None:
    os.kill(run.pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_trainer, kill_run])
def test_killed_run_is_resumed_and_ends_as_if_it_had_not_been(
    folder: Path,  # noqa: F811
    few_prompts: list[str],
    tmp_path: Path,
    kill: object,
) -> None:
    run_dir = tmp_path / "run"
    with launched(folder, "run", run_dir, *few_prompts) as run:
        wait_until(lambda: newest_step(run_dir) >= 6, run)
        kill(run)
        first_output, _ = run.communicate(timeout=200)
    assert run.returncode != 0
    newest = newest_step(run_dir)
    assert 6 <= newest < STEPS
    with launched(folder, "run", run_dir, *few_prompts) as run:
        output, _ = run.communicate(timeout=250)
    assert run.returncode == 0, output
    assert f"Resuming {run_dir} after step {newest} of {STEPS}, from" in output.replace("\n", " ")
    check_ledger(run_dir, newest)
    check_stages(run_dir)
    if kill is kill_run:
        check_finished(folder, few_prompts, run_dir)


def check_finished(folder: Path, few_prompts: list[str], run_dir: Path) -> None:  # noqa: F811
    """A finished run is refused, and resumes when the command gives more steps."""
    with launched(folder, "run", run_dir, *few_prompts) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 2 and "has ended: it is complete after step 20" in output
    # What the first end exported is replaced by that of a longer run.
    exported = (run_dir / "hf" / "final" / "model.safetensors").read_bytes()
    with launched(folder, "run", run_dir, *few_prompts, f"train.steps={STEPS + 1}") as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert (run_dir / "hf" / "final" / "model.safetensors").read_bytes() != exported


def newest_step(run_dir: Path) -> int:
    return max(complete_checkpoints(run_dir / CHECKPOINTS), default=0)


def check_stages(run_dir: Path) -> None:
    """Each batch is of its stage, and each completion was judged by the length rule of its own."""
    seen = set()
    for path in sorted((run_dir / "rollouts").glob("*_??????.jsonl")):
        step = int(path.stem[-6:])
        for record in read_jsonl(path):
            stage = record.get("stage", 0)
            seen.add(stage)
            _, limit, margin = RULES[stage]
            excess = max(0, record["tokens"] - (limit - margin)) / margin
            assert record["tokens"] <= limit
            # An empty completion does not pass the format check, and has no parts.
            is_judged = record["parts"]["format"] > 0
            assert abs(record["parts"]["length"] + 0.1 * excess * is_judged) < 1e-9
            if path.stem.startswith("step"):
                assert stage == sum(step >= first for first, *_ in RULES) - 1
    assert seen == {0, 1, 2}


def check_ledger(run_dir: Path, newest: int) -> None:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if RESUMED in row] == [newest]
    rows = list(stream_rows(run_dir / "metrics.jsonl"))
    # In float32, at each stage's own temperature; some keys and values are of an older version.
    gaps = [row["train/logprob_gap"] for row in rows if "train/logprob_gap" in row]
    assert len(gaps) > STEPS / 2 and max(gaps) < 2e-3
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == list(range(1, STEPS + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["rollouts_trained"] == STEPS * GROUPS * GROUP_SIZE
    assert summary["staleness_max"] <= 3 and (run_dir / "hf" / "final").exists()
    records = [
        record
        for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"))
        for record in read_jsonl(path)
    ]
    assert len(records) == STEPS * GROUPS * GROUP_SIZE
    assert len({(record["group"], record["index"]) for record in records}) == len(records)
    groups = {record["group"]: record["prompt_id"] for record in records}
    assert len(groups) == STEPS * GROUPS and max(groups) >= PROMPTS
    # Groups are numbered as prompts are drawn: each epoch is a stretch of numbers.
    trained = collections.Counter((number // PROMPTS, prompt) for number, prompt in groups.items())
    assert set(trained.values()) == {1}
    # One is missing only where its group had zero variance, or not needed at the end.
    dropped = sum(row.get("queue/groups_dropped_zero_variance", 0) for row in rows)
    dropped += sum(row.get("queue/groups_abandoned", 0) for row in rows)
    assert max(groups) + 1 - len(groups) <= dropped
