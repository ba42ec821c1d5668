"""CONTRIBUTING.md can be followed: its files are written down as they are, its commands run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.wheel_venv import copy_tree

pytestmark = [pytest.mark.slow(60), pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
_BLOCK = re.compile(r"^```(\w+) ([\w. ]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """What a worked example consists of."""

    files: dict[str, str]
    commands: list[str]


def section(title: str) -> Section:
    """The labelled blocks below a heading."""
    _, found, rest = TEXT.partition(f"\n## {title}\n")
    assert found, title
    blocks = _BLOCK.findall(rest.partition("\n## ")[0])
    files = {label: body for _, label, body in blocks if not label.startswith("worked")}
    return Section(files, [body for _, label, body in blocks if label.startswith("worked")])


def follow(title: str, folder: Path, source: Path = ROOT) -> str:
    """Write the files of a section and run its commands in a folder; what they print."""
    found = section(title)
    for name, body in found.files.items():
        (folder / name).write_text(body)
    (commands,) = found.commands
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=inherited
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_test_runs_as_the_page_says() -> None:
    assert "3 passed" in follow("Run one test in seconds", ROOT)


def test_the_loss_has_its_gradient_and_a_run_takes_it(tmp_path: Path) -> None:
    assert "1 passed" in follow("Add a loss", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_a_wrong_loss_would_be_found(tmp_path: Path) -> None:
    found = section("Add a loss").files
    (tmp_path / "my_losses.py").write_text(found["my_losses.py"].replace(".detach()", ""))
    (tmp_path / "test_my_losses.py").write_text(found["test_my_losses.py"])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_my_losses.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1 and "1 failed" in done.stdout


def test_the_task_grades_as_expected(tmp_path: Path) -> None:
    printed = follow("Add a task", tmp_path)
    rows = [re.split(r"\s*│\s*", line)[1:3] for line in printed.splitlines() if "│" in line]
    counts = {reason: count for reason, count in rows if count == "1"}
    assert set(counts) == {"correct", "wrong_answer", "no_think_start"}


# Ranks of all parallel layouts.
@pytest.mark.exhaustive
def test_the_family_has_the_logits_of_transformers(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True, timeout=60)
    assert "8 passed" in follow("Add a model family", tmp_path, tmp_path)


def test_the_page_has_no_block_that_is_neither_run_nor_meant_to_be_read() -> None:
    titles = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    commands = [len(section(title).commands) for title in titles]
    assert sum(commands) == TEXT.count("```bash worked") == 4
    assert shutil.which("git") is not None
