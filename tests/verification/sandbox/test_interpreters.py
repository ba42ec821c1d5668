"""Sandboxes of environments that others made: which Python starts inside."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from verification.sandbox import isolation
from verification.sandbox.sandbox import Sandbox, SandboxSpec
from verification.verdict import GradingError

ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = """
from verification.code.grading import Case, CodeLimits, CodeTests, grade, prepare
tests = CodeTests(cases=[Case("3", "9")])
limits = prepare(CodeLimits(test_s=10.0))
print(limits.isolation, grade("print(int(input()) ** 2)", "python", tests, seed=0, limits=limits))
"""


@pytest.mark.parametrize("has_links", [True, False])
def test_programs_run_whether_the_environment_links_or_copies_python(
    tmp_path: Path, has_links: bool
) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=has_links)
    packages = tmp_path / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "all.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    python = tmp_path / "bin" / "python"
    assert python.is_symlink() == has_links
    done = subprocess.run(
        [python, "-c", _PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "is_correct=True" in done.stdout and done.stdout.split()[0] in isolation.KINDS


def test_a_sandbox_that_ends_at_once_says_why(tmp_path: Path) -> None:
    wrong = tmp_path / "bwrap"
    wrong.write_text("#!/bin/sh\necho 'no namespaces for you' >&2\nexit 1\n")
    wrong.chmod(0o755)
    with pytest.raises(GradingError, match="no namespaces for you"):
        with Sandbox(SandboxSpec(kind="bubblewrap", executable=str(wrong))) as sandbox:
            sandbox.run(None, b"", stdin=b"", limits=None)  # type: ignore[arg-type]
