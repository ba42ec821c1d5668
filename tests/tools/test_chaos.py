"""tools.chaos hits every role, and its audit finds what it names."""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from megatron_rl.protocol.rollout_files import RecordedSpan, RolloutRecord
from tools import chaos
from tools.chaos import Chaos, GaveUp, Plan, compare
from tools.chaos_audit import audit

STEPS, GROUPS, SIZE = 6, 4, 2
SOUND = {"prompts_lost": 0, "trained_twice": 0, "wrong_stamps": 0, "steps": STEPS}


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
    assert audit(run_dir) == SOUND


def test_cold_starts_stages_chats_and_replaced_completions_are_sound(run_dir: Path) -> None:
    config = run_dir / "config.toml"
    stage = "[[stages]]\nat_step = 4\nqueue = {max_staleness = 3}\n"
    config.write_text(config.read_text() + stage)
    path = run_dir / "rollouts/step_000005.jsonl"
    last = [msgspec.json.decode(line, type=RolloutRecord) for line in path.read_text().splitlines()]
    path.unlink()
    spans = [RecordedSpan(4, 0, 1), RecordedSpan(5, 1, 2), RecordedSpan(4, 2, 3)]
    chats = {"prompt_tokens": 1, "spans": spans, "versions": [4, 5, 4], "row_starts": [3]}
    changes = {0: {"versions": [2, 5]}, 1: chats}
    write(run_dir, "step_000005", [
        msgspec.structs.replace(one, stage=1, **changes.get(number, {}))
        for number, one in enumerate(last)
    ])  # fmt: skip
    # Group 4 was dropped before its first score; group 5 lost one completion, and was trained.
    lines = (run_dir / "rollouts/step_000001.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "rollouts/step_000001.jsonl").write_text("".join(lines[SIZE:]))
    write(run_dir, "dropped_000001", [record(5, 0, 1, dropped="ungradable")])
    dropped = {"source": "trainer", "step": 2, "queue/groups_dropped_attempts_exhausted": 1}
    rows = [{"source": "sft", "step": 1, "train/loss": 2.0}, dropped]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert audit(run_dir) == SOUND


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


# A launcher with a queue, which outlives it. From start LAST on it ends well, after SECONDS.
LAUNCHER = """
import pathlib, subprocess, sys, time
run_dir, last, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
run_dir.mkdir(exist_ok=True)
with (run_dir / "metrics.jsonl").open("a") as rows:
    rows.write('{"train/loss": 1.0}\\n')
starts = len((run_dir / "metrics.jsonl").read_text().splitlines())
sleep = [sys.executable, "-c", "import time; time.sleep(100)", "megatron_rl.rollout_queue.server"]
queue, ends_at = None, time.monotonic() + seconds
while starts < last or time.monotonic() < ends_at:
    if queue is None or queue.poll() is not None:
        queue = subprocess.Popen(sleep)
    time.sleep(0.05)
queue.kill()
queue.wait()
(run_dir / "summary.json").write_text("{}")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stops", [0.0, 1.0])
def test_hits_go_round_the_roles_and_what_outlives_them_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: float
) -> None:
    monkeypatch.setattr(chaos, "_LEFT_S", 0.5)
    run_dir, last = tmp_path / "run", 1 if stops else 4
    plan = Plan(
        run=[sys.executable, "-c", LAUNCHER, str(run_dir), str(last), "4.0"], join=[],
        run_dir=run_dir, kills=6, stops=stops, stop_s=0.4, pause_s=(0.5, 0.6), limit_s=60.0,
        starts=8,
    )  # fmt: skip
    found = Chaos(plan, random.Random(0))
    found.run()
    if stops:
        # A process that is stopped is not hit again, and nobody kills it.
        assert found.hits == {"launcher stopped": 3, "queue stopped": 3} == {
            f"{role} stopped": count for role, count in found.outlived.items()
        }  # fmt: skip
        assert (found.starts, found.orphans) == (1, 0)
    else:
        assert found.hits == {"launcher killed": 3, "queue killed": 3} and not found.outlived
        assert (found.starts, found.orphans) == (4, 3)


def test_a_run_that_never_ends_well_meets_a_limit(tmp_path: Path) -> None:
    plan = Plan(
        run=[sys.executable, "-c", ""], join=[], run_dir=tmp_path / "run", kills=0, stops=0.0,
        stop_s=1.0, pause_s=(1.0, 1.0), limit_s=60.0, starts=2,
    )  # fmt: skip
    with pytest.raises(GaveUp, match="after 2 starts"):
        Chaos(plan, random.Random(0)).run()


def test_accuracy_is_compared_within_two_standard_errors_of_the_difference() -> None:
    without = {"accuracy": 0.5, "accuracy_se": 0.03, "wall_s": 100.0}
    # sqrt(0.03^2 + 0.04^2) = 0.05.
    near = compare({"accuracy": 0.59, "accuracy_se": 0.04, "wall_s": 210.0}, without)
    far = compare({"accuracy": 0.61, "accuracy_se": 0.04, "wall_s": 210.0}, without)
    assert near == {"wall_ratio": 2.1, "accuracy_without": 0.5, "is_as_accurate": True}
    assert not far["is_as_accurate"]
