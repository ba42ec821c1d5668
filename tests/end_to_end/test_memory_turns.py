"""The whole system on a tiny random model; its engine has no memory while the trainer computes.

On the CPU the memory stays where it is; who waits for whom, and when, is as on a GPU.
"""

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end import commands
from tests.end_to_end.test_cold_start import inputs  # noqa: F401 - a fixture
from tests.end_to_end.test_lost_generator import (
    GROUP_SIZE,
    GROUPS,
    check_trained,
    folder,  # noqa: F401 - a fixture
    kill_generator,
    restarts,
    wait_until,
)
from tests.end_to_end.test_restarted_trainer import (
    check_repeated,
    kill_rank,
    kill_torchrun,
    taken,
)

pytestmark = [pytest.mark.slow(80), pytest.mark.exhaustive, pytest.mark.timeout(300)]
STEPS = 8
TURNS = [
    "generator.engine=sglang", "generator.colocate=true", "generator.release_memory=true",
    "weights.method=ipc", "weights.kv_cache=recompute", f"train.steps={STEPS}",
    "sampling.max_new_tokens=48", "expert.train.max_mismatch=0.01",
]  # fmt: skip


def rows_of(run_dir: Path, name: str) -> list[dict]:
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if name in row]


def records(run_dir: Path, pattern: str) -> list[dict]:
    paths = sorted((run_dir / "rollouts").glob(pattern))
    return [record for path in paths for record in read_jsonl(path)]


def test_a_run_in_turns_loses_nothing_though_its_generator_dies(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Evaluations lie between, and the engine is killed once."""
    run_dir, evaluated = tmp_path / "run", ["eval.prompts=40", "eval.every_steps=3"]
    config = folder / "config.toml"
    command = ["run", "--config", config, "--run-dir", run_dir, *TURNS, *evaluated]
    with commands.launched(*command) as run:
        wait_until(lambda: bool(rows_of(run_dir, "train/loss")[1:]), run)
        kill_generator(run)
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert len(restarts(run_dir)) == 1
    synced = rows_of(run_dir, "weight_sync/release_s")
    assert [row["weight_sync/release_s"] > 0 for row in synced] == [False] + STEPS * [True]
    assert all(row["weight_sync/reclaim_s"] > 0 for row in synced)
    trained = records(run_dir, "step_*.jsonl")
    assert len(trained) == STEPS * GROUPS * GROUP_SIZE
    assert len({(each["group"], each["index"]) for each in trained}) == len(trained)
    # Some went on after a turn of the trainer, and every token is of the version that is told.
    assert any(len(each["spans"]) > 1 for each in trained)
    evaluations = {row["step"] for row in rows_of(run_dir, "eval/n")}
    assert evaluations == {0, 3, 6, STEPS}
    audit = [sys.executable, "-m", "megatron_rl.cli.main", "audit", str(run_dir)]
    done = subprocess.run(audit, cwd=commands.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS


def test_a_killed_trainer_has_its_memory_back_before_it_repeats_the_steps(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run_dir, given = tmp_path / "run", ["checkpoint.every_steps=3", "train.deterministic=true"]
    command = ["run", "--config", folder / "config.toml", "--run-dir", run_dir, *TURNS, *given]
    kills = [(1, kill_rank), (5, kill_torchrun)]
    with commands.launched(*command) as run:
        for count, (step, kill) in enumerate(kills, 1):
            wait_until(lambda step=step: any(r["step"] >= step for r in taken(run_dir)), run)
            kill(run)
            wait_until(lambda count=count: len(restarts(run_dir, "trainer")) == count, run)
        output, _ = run.communicate(timeout=250)
    assert run.returncode == 0, output
    released = times(run_dir / "logs/trainer-0.log", "1 engines have released their memory")
    assert len(released) == len(kills)
    check_repeated(run_dir, STEPS)
    check_trained(run_dir, STEPS)
    assert not restarts(run_dir) + restarts(run_dir, "queue")
    with commands.launched("audit", run_dir) as audit:
        found, _ = audit.communicate(timeout=200)
    assert audit.returncode == 0, found


def times(log: Path, pattern: str) -> list[float]:
    """When lines were written in which the pattern is found; less its group's seconds, if any."""
    found = []
    for line in log.read_text().splitlines():
        if match := re.search(pattern, line):
            at = datetime.strptime(line.split(",")[0], "%Y-%m-%d %H:%M:%S").timestamp()
            found.append(at - float(match[1]) if match.groups() else at)
    return found


def test_supervised_phases_have_the_gpu_for_themselves(
    inputs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Engines start after the cold start, and the SFT baseline begins when they have ended."""
    run_dir = tmp_path / "run"
    given = [*TURNS, "train.steps=2", "sampling.max_new_tokens=8", "sft.baseline=true"]
    config = ["--config", inputs / "config.toml", "--run-dir", run_dir]
    with commands.launched("run", *config, *given) as run:
        output, _ = run.communicate(timeout=250)
    assert run.returncode == 0, output
    cold_start = (run_dir / "hf" / "cold_start").stat().st_ctime
    started, *_ = times(run_dir / "logs" / "generator-0.log", r"is ready after (\d+) s")
    # Its log rounds both to seconds.
    assert started > cold_start - 2
    assert times(run_dir / "logs" / "generator-0.log", "holds version 0")[0] > cold_start
    phases = list(json.loads((run_dir / "summary.json").read_text())["wall_s"])
    assert phases.index("last_evaluation") < phases.index("sft_baseline")
    assert (run_dir / "hf" / "sft_baseline").is_dir()
