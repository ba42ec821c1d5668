"""A sweep of the whole system: two variants of a short run on a tiny random model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_lost_generator import folder

pytestmark = [pytest.mark.slow(60), pytest.mark.exhaustive, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["folder"]
SWEEP = """
name = "tiny"
base = "config.toml"
seeds = [0]
metrics = ["reward_last10", "steps", "step_s", "train/entropy_nats"]
overrides = ["train.steps=2"]
timeout_s = 120

[grid]
"optimizer.lr" = [1e-4, 2e-4]
"""


def test_two_variants_run_and_are_compared(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (folder / "tiny.toml").write_text(SWEEP)
    command = [sys.executable, "-m", "megatron_rl.cli.main", "sweep", str(folder / "tiny.toml")]
    command += ["--sweep-dir", str(tmp_path)]

    def sweep() -> str:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=280,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "All 2 runs are complete." in sweep()
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [run["variant"] for run in written["runs"]] == ["lr=0.0001", "lr=0.0002"]
    for run in written["runs"]:
        values = run["metrics"]
        assert values["steps"] == 2 and 0 < values["step_s"] < 60
        # Of a random model over 64 tokens: close to uniform.
        assert 3 < values["train/entropy_nats"] < 4.16
        assert 0 <= values["reward_last10"] <= 1.1
    assert sweep().count("complete, not repeated") == 2
