"""tools.gpu_day: rows become tests, nothing stops the others, and a table comes of it."""

import ast
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.gpu_day.__main__ import ORDER, PAGE, ROOT, main, summary
from tools.gpu_day.rows import Outcome, Row, describe, read_rows, table
from tools.gpu_day.runs import Day, run_file

NOT_OF_TESTS = "bash tools/test.sh -m gpu"
"""All tests at once: no row of its own to run."""
TESTS = """
import os, subprocess, sys, time
import pytest

@pytest.fixture(scope="module")
def engine():
    return "engine"

def test_passes(engine, record_property):
    record_property("figure", "0.42 of the peak")

def test_fails():
    assert 1 + 1 == 3, "arithmetic"

@pytest.mark.skipif(True, reason="takes two GPUs")
def test_is_skipped():
    pass

@pytest.mark.timeout(1000)
def test_is_too_slow():
    time.sleep(1000)

def test_takes_the_process_with_it():
    os._exit(7)

def test_hangs_beyond_its_deadline():
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open("child", "w").write(str(child.pid))
    time.sleep(1000)

def test_comes_last():
    assert "HF_HUB_OFFLINE" in os.environ and "TORCHDYNAMO_DISABLE" not in os.environ
"""


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Day:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("TORCHDYNAMO_DISABLE", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    files = (tmp_path / "record.jsonl", tmp_path / "log.txt")
    return Day(*files, test_s=2.0, ends_at=time.monotonic() + 250, grace_s=2.0)


def run(day: Day, text: str) -> dict[str, Outcome]:
    (day.record.parent / "test_some.py").write_text(text)
    return dict(run_file(day, "test_some.py", root=day.record.parent))


def test_no_test_stops_those_after_it(day: Day) -> None:
    found = {test.partition("::")[2]: outcome for test, outcome in run(day, TESTS).items()}
    assert {name: outcome.result for name, outcome in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_is_too_slow": "failed",
        "test_takes_the_process_with_it": "hung",
        "test_hangs_beyond_its_deadline": "hung",
        "test_comes_last": "passed",
    }
    assert found["test_passes"].figures == ["0.42 of the peak"]
    assert "AssertionError: arithmetic" in found["test_fails"].text
    assert found["test_is_skipped"].text == "takes two GPUs"
    # The day's deadline counts, not the test's own.
    assert "Timeout" in found["test_is_too_slow"].text and found["test_is_too_slow"].seconds < 100
    assert "exit code 7" in found["test_takes_the_process_with_it"].text
    assert "no end after" in found["test_hangs_beyond_its_deadline"].text
    child = int((day.record.parent / "child").read_text())
    assert not still_running(child), "what it started would keep the GPU"


def still_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_file_that_cannot_be_imported_is_told(day: Day) -> None:
    [(test, outcome)] = run(day, "import no_such_module_of_cuda\n").items()
    assert test == "test_some.py::*" and outcome.result == "failed"
    assert "no_such_module_of_cuda" in outcome.text
    row = Row("c", "k", "test_some.py", ("anything",))
    assert describe(row, {test: outcome}).startswith("1 failed in 0 s; ModuleNotFoundError")


def test_the_end_of_the_day_ends_a_test_without_a_word(day: Day) -> None:
    short = Day(day.record, day.log, test_s=600.0, ends_at=time.monotonic() + 12)
    started = time.monotonic()
    found = run(short, "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n")
    assert list(found) == ["test_some.py::test_a"] and time.monotonic() - started < 60


def rows_of_tests() -> list[Row]:
    return [row for row in read_rows(PAGE.read_text()) if row.path]


def test_every_row_that_tests_show_is_of_a_file_that_is_run() -> None:
    rows = read_rows(PAGE.read_text())
    assert {row.path for row in rows_of_tests()} == set(ORDER)
    assert all((ROOT / path).is_file() for path in ORDER)
    for row in rows:
        assert row.path or "tools/test.sh" not in row.command or NOT_OF_TESTS in row.command, row


def gpu_tests() -> list[str]:
    """Read, not collected: their imports take seconds."""
    return [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in sorted((ROOT / "tests" / "gpu").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_every_gpu_test_has_a_row_and_every_row_a_test() -> None:
    tests = gpu_tests()
    assert len(tests) > 40
    rows = rows_of_tests()
    assert [test for test in tests if not any(row.takes(test) for row in rows)] == []
    of_gpu = [row for row in rows if row.path.startswith("tests/gpu/")]
    assert [row for row in of_gpu if not any(row.takes(test) for test in tests)] == []


def test_a_row_says_what_its_tests_came_to() -> None:
    rows = read_rows(
        "| claim | command | hardware | date | figure |\n|---|---|---|---|---|\n"
        '| a \\| b | `bash tools/test.sh t/a.py -k "one or two"` (x) | - | - | not yet run |\n'
        "| all | `run it`, or `bash tools/test.sh t/a.py` | - | - | not yet run |\n"
        "| by hand | `megatron-rl run` | - | - | not yet run |\n"
    )
    assert [(row.path, row.words) for row in rows] == [
        ("t/a.py", ("one", "two")), ("t/a.py", ()), ("", ()),
    ]  # fmt: skip
    outcomes = {
        "t/a.py::test_One[x]": Outcome("passed", 2.0, figures=["1.5 s"]),
        "t/a.py::test_two": Outcome("failed", 1.2, "E: a | b"),
        "t/a.py::test_three": Outcome("skipped", 0.0, "takes two GPUs"),
        "t/b.py::test_one": Outcome("hung"),
    }
    said = [describe(row, outcomes) for row in rows]
    assert said == [
        "1 passed, 1 failed in 3 s; 1.5 s; E: a \\| b",
        "1 passed, 1 failed, 1 skipped in 3 s; 1.5 s; E: a \\| b",
        "not yet run",
    ]
    lines = table(rows, outcomes, "H100", "2026-11-24").splitlines()
    assert lines[1] == f"| all | {rows[1].command} | H100 | 2026-11-24 | {said[1]} |"
    # It can be pasted: what is printed is read as the same rows.
    assert read_rows("\n".join(["| h |", "|---|", *lines])) == rows[:2]
    text = summary(rows[:2], outcomes, "host")
    assert "t/a.py::test_two: failed" in text and "Not reached:\n- none" in text


def test_the_command_runs_files_and_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as a host without GPUs goes: all is skipped."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    command = ["gpu_day", "--out", str(tmp_path), "--only", "exchange", "--minutes", "3"]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"day.md", "record.jsonl", "log.txt"}
    page = (tmp_path / "day.md").read_text()
    assert "skipped in 0 s; no CUDA device" in page and "no GPU" in page
    assert "The digest is taken on the device" in page
    assert page in capsys.readouterr().out
