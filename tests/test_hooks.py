"""Hooks of Git: local, of pinned programs, and about what is there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / ".pre-commit-config.yaml"


def hooks() -> list[dict[str, Any]]:
    repos = yaml.safe_load(SETTINGS.read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    return repos[0]["hooks"]


def test_pre_commit_takes_the_file() -> None:
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(SETTINGS)],
        check=True, timeout=200,
    )  # fmt: skip


def test_hooks_download_nothing_and_name_what_is_there() -> None:
    pinned = (ROOT / "requirements" / "dev.txt").read_text()
    for hook in hooks():
        # Run by the program itself, in no environment of pre-commit's.
        assert hook["language"] == "unsupported" and "additional_dependencies" not in hook
        program, *words = hook["entry"].split()
        assert program in (".venv/bin/ruff", ".venv/bin/python", "bash")
        if "-m" in words:
            assert f"\n{words[words.index('-m') + 1]}==" in pinned
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    assert "\nruff==" in pinned and "\npre_commit==" in pinned
