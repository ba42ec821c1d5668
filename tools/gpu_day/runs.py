"""Runs a file of tests in a sub-process, and again after each test that ended the process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.backend.environment import ranks_environment
from tools.gpu_day.record import DEADLINE_VARIABLE, RECORD_VARIABLE
from tools.gpu_day.rows import Outcome

ROOT = Path(__file__).resolve().parents[2]
IMPORTS_S = 300.0
"""Deadline of a file's first test: a cold disk reads gigabytes of libraries."""
GRACE_S = 30.0
"""Time beyond a test's deadline before its process is killed."""
POLL_S = 0.2
_SETTINGS = {
    # Tests must not use a hub.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Day:
    """Settings of all files."""

    record: Path
    log: Path
    test_s: float
    """Deadline of a test."""
    ends_at: float
    """By time.monotonic()."""
    grace_s: float = GRACE_S


def run_file(day: Day, path: str, root: Path = ROOT) -> Iterator[tuple[str, Outcome]]:
    """(test, outcome) as the tests end, until day.ends_at.

    PATH::* stands for all tests of a file that cannot be imported. path is relative to root.
    """
    done: set[str] = set()
    while time.monotonic() < day.ends_at:
        process = _Process(day, path, root, done)
        before = len(done)
        try:
            for test, outcome in process.outcomes():
                done.add(test)
                yield test, outcome
        finally:
            process.kill()
        if process.has_finished or process.is_over:
            return
        if len(done) == before:
            yield f"{path}::*", Outcome("failed", text=process.last_words())
            return


class _Process:
    """pytest on one file, without finished tests."""

    def __init__(self, day: Day, path: str, root: Path, done: set[str]) -> None:
        self.has_finished = False
        """Whether no test of the file is left."""
        self.is_over = False
        """Whether the day ended first."""
        self._day = day
        self._running: dict[str, float] = {}
        day.record.touch()
        self._read_to = day.record.stat().st_size
        self._log_from = day.log.stat().st_size if day.log.exists() else 0
        command = [sys.executable, "-m", "pytest", path, "-p", "tools.gpu_day.record", "-rN", "-v"]
        command += [word for test in sorted(done) for word in ("--deselect", test)]
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with day.log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                cwd=root,
                env=os.environ
                | _SETTINGS
                | ranks_environment("cuda", 1)
                | {
                    "PYTHONPATH": search,
                    RECORD_VARIABLE: str(day.record.resolve()),
                    DEADLINE_VARIABLE: str(day.test_s),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def outcomes(self) -> Iterator[tuple[str, Outcome]]:
        """(test, outcome) as tests end; a test that ends the process or never ends is `hung`."""
        heard, limit_s = time.monotonic(), IMPORTS_S
        while True:
            code = self._child.poll()
            for line in self._lines():
                heard, limit_s = time.monotonic(), self._day.test_s + self._day.grace_s
                if "result" in line:
                    self._running.pop(line["test"], None)
                    yield line.pop("test"), Outcome(**line)
                else:
                    self._running[line["test"]] = heard
            now = time.monotonic()
            if code is not None:
                yield from self._lost(f"its process ended with exit code {code}")
                # 0, 1: all tests were run; 5: none was left.
                self.has_finished = not self._running and code in (0, 1, 5)
                return
            if now > self._day.ends_at:
                self.is_over = True
                return
            if now - heard > limit_s:
                yield from self._lost(f"no end after {now - heard:.0f} s")
                return
            time.sleep(POLL_S)

    def _lost(self, why: str) -> Iterator[tuple[str, Outcome]]:
        now = time.monotonic()
        for test, began in self._running.items():
            yield test, Outcome("hung", now - began, why)

    def _lines(self) -> list[dict[str, Any]]:
        """Records since the last call."""
        with self._day.record.open() as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read_to += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]

    def kill(self) -> None:
        """Kill the process and its descendants: engines would keep the GPU from the next file."""
        found = []
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._child.pid)
            found = [*parent.children(recursive=True), parent]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()

    def last_words(self) -> str:
        """The last error line of its output, else the last line."""
        with self._day.log.open("rb") as file:
            file.seek(self._log_from)
            lines = file.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("E ")]
        return (errors or lines or [""])[-1].removeprefix("E ").strip()
