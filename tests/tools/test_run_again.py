"""The test command on a small project whose tests fail once, or always."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--share")
"""
ONCE = """from pathlib import Path


def test_{0}():
    seen = Path("seen_{0}")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""
ALWAYS = """def test_{0}():
    assert False
"""


@pytest.mark.parametrize(
    ("texts", "status", "last"),
    [
        ([ONCE], 0, "[test] passed only alone: tests/test_0.py::test_0"),
        ([ONCE, ALWAYS], 1, "1 failed, 1 passed"),
        ([ONCE, ONCE, ONCE], 1, "3 failed"),
    ],
)
def test_one_or_two_failed_tests_run_again_alone(
    tmp_path: Path, texts: list[str], status: int, last: str
) -> None:
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    for folder in ("tools", "tests"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "tools/test.sh", tmp_path / "tools")
    (tmp_path / "tools/install.sh").write_text("")  # It is installed.
    (tmp_path / "tests/conftest.py").write_text(CONFTEST.lstrip())
    for number, text in enumerate(texts):
        (tmp_path / f"tests/test_{number}.py").write_text(text.format(number))
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    command = ["bash", "tools/test.sh", "--share", "0.06"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert last in ended.stdout.splitlines()[-1]
    assert ("[test] again, alone" in ended.stdout) == (len(texts) < 3)
