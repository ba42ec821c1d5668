"""The audit of tools.chaos finds what it names."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from megatron_rl.protocol.rollout_files import RolloutRecord
from tools.chaos_audit import audit

STEPS, GROUPS, SIZE = 6, 4, 2


def record(group: int, index: int, *versions: int, dropped: str = "") -> RolloutRecord:
    return RolloutRecord(
        prompt_id=f"p{group}", group=group, index=index, task="t", problem="", language="en",
        text="", answer="", reward=0.0, parts={}, reason="", tokens=3, versions=list(versions),
        finish_reason="stop", seed=0, prompt_tail="", dropped=dropped,
    )  # fmt: skip


def write(run_dir: Path, name: str, records: Iterable[RolloutRecord]) -> None:
    folder = run_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(one) + b"\n" for one in records)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Six steps of four groups; each step's samples are of the version before, or of both."""
    (tmp_path / "config.toml").write_text(
        f'[model]\npath = "{tmp_path}"\n[train]\nsteps = {STEPS}\nprompts_per_batch = {GROUPS}\n'
        f'group_size = {SIZE}\n[queue]\nmax_staleness = 1\nstrict_staleness = true\n[run]\n'
        f'dir = "{tmp_path}"\n[[prompts]]\npath = "{tmp_path}/p.jsonl"\n'
    )  # fmt: skip
    for step in range(STEPS):
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        oldest = max(0, step - 1)
        write(tmp_path, f"step_{step:06d}", [
            record(group, index, oldest, step) for group in groups for index in range(SIZE)
        ])  # fmt: skip
    rows = [{"source": "trainer", "step": n + 1, "train/loss": 0.1} for n in range(STEPS)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_sound_run_has_nothing_to_find(run_dir: Path) -> None:
    assert audit(run_dir) == {
        "prompts_lost": 0, "trained_twice": 0, "wrong_stamps": 0, "steps": STEPS,
    }  # fmt: skip


def test_what_is_lost_twice_or_mislabeled_is_counted(run_dir: Path) -> None:
    lines = (run_dir / "rollouts/step_000001.jsonl").read_text().splitlines(keepends=True)
    # Group 4 is lost; group 5 was dropped without a record, and the metrics count it.
    (run_dir / "rollouts/step_000001.jsonl").write_text("".join(lines[2 * SIZE :]))
    row = {"source": "trainer", "step": 2, "queue/groups_dropped_attempts_exhausted": 1}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    # Trained again; too old; from the future; versions that go back.
    write(run_dir, "step_000005", [record(8, 0, 5)])
    write(run_dir, "step_000004", [record(90, 0, 2), record(90, 1, 5), record(91, 0, 4, 3)])
    found = audit(run_dir)
    assert (found["trained_twice"], found["wrong_stamps"]) == (1, 3)
    # Those of the groups before 90, but the open ones: 24 to 83.
    assert found["prompts_lost"] == 1 + len(range(24, 92 - 2 * GROUPS))
