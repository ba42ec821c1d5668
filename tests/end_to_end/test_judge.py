"""A debate whose judge is killed: no conversation is lost, and none is paid by anything else.

A generator that joins the run asks the same judge.
"""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end.commands import launched

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow(200), pytest.mark.timeout(500)]

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, LIMIT_S = 16, 400
SETTINGS = [
    f"train.steps={STEPS}",
    "sft.steps=60",
    "eval.prompts=40",
    "expert.scorer.max_restarts=1",
]


def start_of_judge(run_dir: Path) -> int:
    """The judge's pid."""
    log = (run_dir / "logs" / "launch.log").read_text()
    return int(re.findall(r"started scorer-0, pid (\d+)", log)[-1])


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return sum("rollout/correct" in row for row in read_jsonl(path)) if path.exists() else 0


def test_a_killed_judge_is_started_again_and_every_debate_is_paid_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples' / 'agents'}")
    run_dir = tmp_path / "run"
    command = ["bash", "examples/agents/run.sh", "debate", "--run-dir", str(run_dir), *SETTINGS]
    with (tmp_path / "out").open("w") as out:
        running = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        deadline = time.monotonic() + LIMIT_S
        while steps_of(run_dir) < 2:
            assert running.poll() is None and time.monotonic() < deadline, said(tmp_path)
            time.sleep(0.2)
        with launched("join", run_dir, "--generators", "1") as joined:
            os.kill(start_of_judge(run_dir), signal.SIGKILL)
            assert running.wait(deadline - time.monotonic()) == 0, said(tmp_path)
            assert joined.wait(60) == 0
    log = (run_dir / "logs" / "launch.log").read_text()
    assert log.count("started scorer-0") == 2 and "scorer-0 ended with exit code 0" in log
    assert steps_of(run_dir) == STEPS
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert not any(row.get("queue/completions_dropped_environment_failed") for row in rows)
    records = [
        line
        for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"))
        for line in read_jsonl(path)
    ]
    cases = {
        prompt["id"]: json.loads(prompt["entry"])
        for prompt in read_jsonl(run_dir / "tasks" / "prompts.jsonl")
    }
    assert len(records) == STEPS * 128
    assert {record["generator"] for record in records} == {"generator-0", "generator-1"}
    for record in records:
        first, second = (one["value"] for one in record["turn_returns"])
        assert first + second == pytest.approx(1.0)
        right = cases[record["prompt_id"]]["right"]
        assert record["reward"] == pytest.approx((first, second)[right])
        assert len(record["row_starts"]) == 1


def said(folder: Path) -> str:
    return (folder / "out").read_text()[-3000:]
