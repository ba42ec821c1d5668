"""Types of the packages that pyproject.toml lists hold, strictly; others are listed as not yet."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# A first call reads the hints of every dependency; later ones take seconds.
pytestmark = [pytest.mark.slow(25), pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def mypy(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, arguments)],
        cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def test_the_listed_packages_have_no_type_errors() -> None:
    done = mypy()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_is_strict_and_follows_our_packages(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from megatron_rl.protocol.metrics import Metric\n"
        "def bare(x): return x\n"
        "mean: str = Metric('a/b', 1.0).value\n"
        "Metric('a/b', 1.0, 'median')\n"
    )
    done = mypy(wrong)
    found = re.findall(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)
    assert found == [("2", "no-untyped-def"), ("3", "assignment"), ("4", "arg-type")]


def test_every_folder_is_checked_or_listed_as_not_yet() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.search(r"Not yet strict: (.*?)\.\n", text, re.DOTALL)
    assert listed is not None
    not_yet = set(re.findall(r"`([\w/]+)/`", listed[1]))
    folders = {f"megatron_rl/{path.parent.name}" for path in ROOT.glob("megatron_rl/*/__init__.py")}
    assert not_yet == (folders | {"generation", "verification"}) - set(SETTINGS["files"])
