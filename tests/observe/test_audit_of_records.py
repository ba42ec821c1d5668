"""An audit compares every figure with records of the real queue, and tells of lost records."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.files import dump_toml
from megatron_rl.observe.audit import audit_records
from megatron_rl.observe.audit_findings import SHOWN, WHOLE, Findings
from megatron_rl.protocol.types import UNGRADABLE, Score
from tests.observe.recorded_run import GROUPS, SIZE, STEPS, change_row, record_run, remove_line
from tests.rollout_queue.makers import RIGHT
from tests.rollout_queue.played_queue import PlayedQueue

MATCH = "metrics of a step match its rollouts"
SUMMARY = "the summary matches the metrics and records"
NOT_COMPARED = ("time", "source", "step", "train/", "wait/", "weight_sync/")
WRONG = Score(0.0, {"format": 0.0, "correct": 0.0}, "wrong_answer")
NO_SOURCE = {"sft_baseline", "wall_s", "hf_export"}
"""Values of a summary that no record has."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def run_dir(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def audited(folder: Path) -> Findings:
    return audit_records(folder, lambda done, total: None)


def broken(findings: Findings) -> dict[str, int]:
    return {name: rule.broken for name, rule in findings.rules.items() if rule.broken}


def row_of(folder: Path, step: int) -> dict:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(row for row in lines if row["step"] == step and "queue/rollouts_trained" in row)


def file_of(folder: Path, step: int, kind: str = "step") -> Path:
    return folder / "rollouts" / f"{kind}_{step - 1:06d}.jsonl"


def step_with_drops(folder: Path) -> int:
    steps = range(1, STEPS + 1)
    return next(s for s in steps if row_of(folder, s)["queue/groups_dropped_zero_variance"])


def test_records_of_the_real_queue_hold(run_dir: Path) -> None:
    findings = audited(run_dir)
    assert not broken(findings), findings
    assert findings.verdict == "all rules hold"
    assert findings.rules[WHOLE].looked_at == STEPS
    # Lines of files, counted by hand: no rollout is passed over.
    lines = sum(len(p.read_text().splitlines()) for p in (run_dir / "rollouts").glob("*.jsonl"))
    assert findings.rules["versions of a rollout only rise"].looked_at == lines
    assert len(list((run_dir / "rollouts").glob("dropped_*.jsonl"))) > 2
    told = [text for text in findings.skipped if text.startswith("figures that")]
    names = "train/*, wait/*, weight_sync/*"
    assert told == [f"figures that rollouts do not yield: {names}"]


def test_a_replaced_completion_and_its_replacement_may_both_be_dropped(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    def judge(prompt: str, index: int) -> Score | str:
        """The last completion cannot be graded at first; half of the groups are all wrong."""
        tries[prompt] += index == 3
        if index == 3 and tries[prompt] == 1:
            return UNGRADABLE
        return RIGHT if index == 1 and int(prompt[1:]) % 2 == 0 else WRONG

    queue = PlayedQueue(tmp_path, judge, queue={"max_attempts": 1})
    (tmp_path / "config.toml").write_text(dump_toml(queue.config))
    queue.start()
    queue.play(20)
    dropped = file_of(tmp_path, 1, "dropped")
    lines = [json.loads(line) for line in dropped.read_text().splitlines()]
    places = Counter((line["group"], line["index"]) for line in lines)
    assert max(places.values()) == 2
    assert not broken(audited(tmp_path))
    # A scored completion that is there twice contradicts its group.
    twice = [line for line in lines if line["reward"] is not None][:1]
    dropped.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *twice]))
    assert broken(audited(tmp_path)) == {"a group has each rollout once": 1}


def test_an_evaluation_may_lose_a_problem_halfway(tmp_path: Path) -> None:
    rules = {"prompts": 3, "samples": 4, "timeout_s": 8.5, "temperature": 1.0}
    classes = lambda request: [0] * len(request.texts)  # noqa: E731
    queue = PlayedQueue(tmp_path, lambda p, i: RIGHT, held_out=3, eval=rules, classify=classes)
    (tmp_path / "config.toml").write_text(dump_toml(queue.config))
    queue.start()
    queue.play(14, is_slow=True)
    folder = tmp_path / "rollouts"
    lines = (folder / "eval_before.jsonl").read_text().splitlines(keepends=True)
    lost = (folder / "dropped_eval_before.jsonl").read_text().splitlines()
    # Two of three problems are whole, and the deadline ended the third one in its middle.
    assert len(lines) == 8 and 0 < len(lost) < 4
    assert not broken(audited(tmp_path))
    for kept in (lines[:-1], lines[:4]):
        (folder / "eval_before.jsonl").write_text("".join(kept))
        assert broken(audited(tmp_path)) == {WHOLE: 1}


def test_every_figure_of_a_step_is_compared(run_dir: Path) -> None:
    step = step_with_drops(run_dir)
    before = (run_dir / "metrics.jsonl").read_text()
    names = [name for name in row_of(run_dir, step) if not name.startswith(NOT_COMPARED)]
    assert {"rollout/correct", "rollout/format", "rollout/truncated", "reason/correct",
            "reward/correct", "queue/rollouts_spanning_versions"} <= {*names}  # fmt: skip
    for name in [*names, "reason/of_nothing", "queue/completions_dropped_ungradable"]:
        change_row(run_dir, step, lambda row, name=name: row.update({name: row.get(name, 0) + 1}))
        found = audited(run_dir)
        assert broken(found).get(MATCH) == 1, (name, broken(found))
        assert f"step {step}: {name} is " in found.rules[MATCH].examples[0]
        (run_dir / "metrics.jsonl").write_text(before)


def test_every_value_of_the_summary_is_compared(run_dir: Path) -> None:
    path = run_dir / "summary.json"
    right = json.loads(path.read_text())
    unnoticed = set()
    for name, value in right.items():
        other = value + 1 if isinstance(value, int | float) else {"x": 1}
        path.write_text(json.dumps(right | {name: other}))
        if not broken(audited(run_dir)):
            unnoticed.add(name)
    assert unnoticed == NO_SOURCE
    listed = right["evaluations"]
    for label, found in listed.items():
        changed = listed | {label: found | {"reward": found["reward"] + 1}}
        path.write_text(json.dumps(right | {"evaluations": changed}))
        assert broken(audited(run_dir)), label
    # Earlier releases wrote none.
    for found in listed.values():
        del found["reward"]
    path.write_text(json.dumps(right))
    told = [text for text in audited(run_dir).skipped if text.startswith("summary.json")]
    assert told == ["summary.json: hf_export, sft_baseline, wall_s: no record has them"]
    assert not broken(audited(run_dir))


def test_lost_files_are_told_by_step(run_dir: Path) -> None:
    for step in (1, 2, 3):
        file_of(run_dir, step).unlink()
    findings = audited(run_dir)
    assert broken(findings) == {WHOLE: 3}
    assert findings.verdict.startswith("records are missing")
    assert "step 1: " in findings.rules[WHOLE].examples[0]
    file_of(run_dir, 4).with_suffix(".jsonl.gz").write_bytes(
        gzip.compress(file_of(run_dir, 4).read_bytes())
    )
    file_of(run_dir, 4).unlink()
    text = audited(run_dir).rules[WHOLE].examples[-1]
    assert "step_000003.jsonl is missing" in text and "step_000003.jsonl.gz): unpack" in text
    shutil.rmtree(run_dir / "rollouts")
    rule = audited(run_dir).rules[WHOLE]
    assert (rule.broken, len(rule.examples)) == (STEPS, SHOWN)


def test_the_newest_step_of_a_run_that_goes_on_may_lack_its_file(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    file_of(run_dir, STEPS).unlink()
    findings = audited(run_dir)
    assert not broken(findings)
    assert f"step {STEPS}: the queue may not have written its rollouts yet" in findings.skipped
    file_of(run_dir, STEPS - 1).unlink()
    assert broken(audited(run_dir)) == {WHOLE: 1}


@pytest.mark.parametrize("kind", ["step", "dropped"])
def test_a_line_that_was_taken_out_is_told_as_such(run_dir: Path, kind: str) -> None:
    step = step_with_drops(run_dir)
    path = file_of(run_dir, step, kind)
    has = len(path.read_text().splitlines())
    if kind == "step":
        assert has == GROUPS * SIZE
    remove_line(path, 2)
    findings = audited(run_dir)
    assert broken(findings) == {WHOLE: 1}
    what = {"step": "trained", "dropped": "dropped"}[kind]
    [text] = findings.rules[WHOLE].examples
    assert f"has {has - 1} of {has} {what} rollouts: lines are missing" in text
    assert f"figures of steps that lack rollouts, such as step {step}" in findings.skipped


def test_a_damaged_line_is_told_once(run_dir: Path) -> None:
    path = file_of(run_dir, 4)
    path.write_text(path.read_text().replace('"reward"', '"rewrad"', 1))
    findings = audited(run_dir)
    assert broken(findings) == {"token ids and logprobs match their lines": 1}
    assert "figures of steps that lack rollouts, such as step 4" in findings.skipped


def test_a_row_that_was_taken_out_is_told_as_such(run_dir: Path) -> None:
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    at = next(n for n, row in enumerate(rows, 1) if json.loads(row) == row_of(run_dir, 5))
    remove_line(run_dir / "metrics.jsonl", at)
    findings = audited(run_dir)
    assert broken(findings) == {WHOLE: 1}
    assert "no row of 1 of 12 steps, the first is 5" in findings.rules[WHOLE].examples[0]


@pytest.mark.parametrize("value", ["abc", None, [1.0], True])
def test_a_value_that_is_no_number_is_named_with_its_line(run_dir: Path, value: object) -> None:
    change_row(run_dir, 7, lambda row: row.update({"rollout/reward": value}))
    findings = audited(run_dir)
    assert broken(findings) == {"metrics are numbers": 1}
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    line = next(n for n, row in enumerate(rows, 1) if json.loads(row) == row_of(run_dir, 7))
    [text] = findings.rules["metrics are numbers"].examples
    assert text == f"{run_dir}/metrics.jsonl:{line}: rollout/reward is {value!r}"


def test_a_row_without_its_step_is_named(run_dir: Path) -> None:
    change_row(run_dir, STEPS, lambda row: row.update(step="x"))
    found = audited(run_dir)
    assert "step is 'x'" in found.rules["metrics are numbers"].examples[0]


def test_counts_of_the_step_are_those_of_its_lines(run_dir: Path) -> None:
    """The fixture itself: reasons of a row by a plain count over both files."""
    step = step_with_drops(run_dir)
    paths = [file_of(run_dir, step, kind) for kind in ("step", "dropped")]
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    row = row_of(run_dir, step)
    assert Counter(record["reason"] for record in records) == {
        name.removeprefix("reason/"): row[name] for name in row if name.startswith("reason/")
    }


def test_a_reader_that_has_seen_enough_does_not_change_the_verdict(run_dir: Path) -> None:
    for wanted in (0, 1):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "megatron_rl.cli.main", "audit", str(run_dir)]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=100)
        os.close(writer)
        assert (done.returncode, done.stderr) == (wanted, b"")
        file_of(run_dir, 1).unlink(missing_ok=True)


def test_an_evaluation_has_no_model_to_load(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["audit", "--model", str(run_dir)]) == 2
    assert f"{run_dir}/hf/final is gone" in caplog.text
    config = run_dir / "config.toml"
    caplog.clear()
    config.write_text(config.read_text().replace(f"steps = {STEPS}", "steps = 0"))
    assert main(["audit", "--model", str(run_dir)]) == 2
    assert "took no step of reinforcement learning" in caplog.text and "gone" not in caplog.text
    (run_dir / "summary.json").unlink()
    assert main(["audit", "--model", str(run_dir)]) == 2
    assert "its run has not ended" in caplog.text
    caplog.clear()
    (run_dir / "eval.json").write_text("{}")
    assert main(["audit", "--model", str(run_dir)]) == 2
    assert "is an evaluation" in caplog.text and "has not ended" not in caplog.text


def test_view_says_which_steps_lack_rollouts(run_dir: Path) -> None:
    for path in (run_dir / "rollouts").glob("*.jsonl"):
        path.unlink()
    command = [sys.executable, "-m", "megatron_rl.cli.main", "view", str(run_dir)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as view:
        assert view.stdout is not None and view.stderr is not None
        said = view.stdout.readline()
        # The page is served once its address is told.
        while "http://" not in (text := view.stdout.readline()):
            said += text
        view.terminate()
        warned = view.stderr.read()
        assert view.wait(timeout=60) == 0
    assert said.startswith("0 rollouts of ")
    assert "12 of 12 steps have no file of rollouts, the first is step 1" in warned


def test_commands_that_read_rollouts_say_which_steps_lack_them(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 3):
        file_of(run_dir, step).unlink()
    (run_dir / "rollouts" / "step_000001.jsonl.gz").write_bytes(b"")
    told = (
        f"{run_dir}: 2 of 12 steps have no file of rollouts, the first is step 2 "
        "(step_000001.jsonl); these steps are left out; packed files are not read (1, the first is "
        "step_000001.jsonl.gz): unpack them"
    )
    lengths = ["analyse", "lengths", str(run_dir), "--no-plots", "--out", str(tmp_path / "out")]
    for command in (["report", str(run_dir)], lengths):
        caplog.clear()
        assert main(command) == 0
        assert told in caplog.messages
    caplog.clear()
    (run_dir / "summary.json").unlink()
    assert main(["report", "--text", str(run_dir)]) == 0
    assert told in caplog.messages
