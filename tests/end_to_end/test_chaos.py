"""The whole system, on a tiny random model, while tools.chaos kills and stops its processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.protocol.types import ScoreRequest
from tests.end_to_end.commands import ROOT, write_inputs
from tests.end_to_end.test_lost_generator import CONFIG

pytestmark = [pytest.mark.slow(300), pytest.mark.exhaustive, pytest.mark.timeout(500)]

STEPS, HITS = 40, 8
GIVEN = [
    f"train.steps={STEPS}", "parallel.tensor=2", "checkpoint.every_steps=5", "eval.prompts=50",
    "eval.every_steps=0", "reward.tasks.any_text.compare=tests.end_to_end.test_chaos:has_an_a",
    "expert.queue.heartbeat_timeout_s=4", "expert.nodes.silence_timeout_s=10",
    *(f"expert.{role}.restart_window_s=30" for role in ("queue", "generator", "verifier", "train")),
]  # fmt: skip


def has_an_a(answer: str, request: ScoreRequest) -> bool:
    """Half of the completions of a random model are right, and it can learn the rest."""
    return "a" in answer


def test_training_outlives_hits_on_every_role(tmp_path: Path) -> None:
    config = write_inputs(tmp_path, CONFIG, train=3000, held_out=50)
    command = [
        sys.executable, "-m", "tools.chaos", "--config", config, "--run-dir", tmp_path / "run",
        "--kills", HITS, "--stops", 0.3, "--stop-s", 15, "--pause-s", 3, 6, "--limit-s", 400,
        "--join", *GIVEN,
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    nothing = ("prompts_lost", "trained_twice", "wrong_stamps", "orphans")
    assert [found[name] for name in nothing] == [0, 0, 0, 0], done.stderr
    assert (found["steps"], found["kills"]) == (STEPS, HITS)
