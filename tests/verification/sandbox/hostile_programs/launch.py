"""Starts a module that grades hostile programs in a process of its own, as us or as another user.

A module is started with the kind of isolation and further words, and prints JSON.
"""

import functools
import os
import subprocess
import sys
from typing import TypeVar

import msgspec
import psutil
import pytest

from tests.verification.sandbox.hostile_programs.run import REPOSITORY
from verification.sandbox import confinement, isolation
from verification.verdict import GradingError

NOBODY = "nobody"
Answer = TypeVar("Answer")
_PACKAGE = "tests.verification.sandbox.hostile_programs"


@functools.cache
def _python_for_anyone() -> str:
    """An interpreter that an unprivileged user can run with our packages; skips without one."""
    try:
        python = isolation.roots(for_anyone=True).interpreter.executable
    except GradingError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [python, "-c", "import msgspec, psutil, pyseccomp, tests, verification"],
        user=isolation.NOBODY, group=isolation.NOBODY, extra_groups=[], env=_environment(),
        cwd="/", capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(
            f"an unprivileged user cannot run the tests with {python}: {done.stderr[-300:]}"
        )
    return python


def _environment() -> dict[str, str]:
    packages = os.path.dirname(os.path.dirname(psutil.__file__))
    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {"PATH": path, "PYTHONPATH": f"{REPOSITORY}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}


def launch(module: str, kind: str, user: str, *words: str, answer: type[Answer]) -> Answer:
    """What a module of this package answers; skips where the kind or the user is impossible."""
    if kind == "landlock" and confinement.landlock_version() < confinement.LEAST_LANDLOCK:
        pytest.skip("this kernel has no Landlock that suffices")
    options = {}
    python = sys.executable
    if user == NOBODY:
        if not isolation.is_root():
            pytest.skip("only root can become an ordinary user; as one, the other runs suffice")
        python = _python_for_anyone()
        options = {"user": isolation.NOBODY, "group": isolation.NOBODY, "extra_groups": []}
    done = subprocess.run(
        [python, "-m", f"{_PACKAGE}.{module}", kind, *words],
        cwd="/", env=_environment(), capture_output=True, text=True, timeout=550, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.json.decode(done.stdout, type=answer)
