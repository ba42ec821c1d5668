"""Code repair: `examples/agents/run.sh repair`, whose last replies the verifier grades."""

import json
import subprocess
from pathlib import Path

import pytest

from megatron_rl.protocol.metrics import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow(150), pytest.mark.timeout(500)]

SETTINGS = ["train.steps=3", "eval.prompts=16"]
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair") / "run"
    command = ["bash", "examples/agents/run.sh", "repair", "--run-dir", str(folder), *SETTINGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_rewards_are_those_of_the_hidden_tests(run_dir: Path) -> None:
    """A paid program adds the number that the tests hide; any other earns the format's part."""
    prompts = {p["id"]: json.loads(p["entry"]) for p in read_jsonl(run_dir / "tasks/prompts.jsonl")}
    records = [
        line
        for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"))
        for line in read_jsonl(path)
    ]
    graded = [line for line in records if "to_grade" in line]
    assert len(graded) == len(records) >= 3 * 8 * 4
    assert {line["reason"] for line in graded} >= {"correct", "wrong_output"}
    for line in graded:
        # The last reply ends the conversation.
        assert line["text"].endswith(line["to_grade"])
        number = line["to_grade"].partition("print(")[2].partition("+")[0]
        if line["reason"] == "correct":
            cases = prompts[line["prompt_id"]]["cases"]
            assert all(int(one["stdin"]) + int(number) == int(one["stdout"]) for one in cases)
            assert line["reward"] == pytest.approx(1.0)
        else:
            assert line["reward"] <= 0.1 + 1e-9


def test_records_are_graded_again_as_they_were(run_dir: Path) -> None:
    path = sorted((run_dir / "rollouts").glob("step_*.jsonl"))[-1]
    command = [".venv/bin/megatron-rl", "verify", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdicts are those that the file holds" in done.stdout
