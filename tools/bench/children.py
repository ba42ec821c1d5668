"""Runs the benchmark's commands one after another, each with a deadline and a log file."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_END_GRACE_S = 20.0
_TAIL_LINES = 20


class ChildFailed(RuntimeError):
    """A command failed or took too long; the text names it and shows the end of its log."""


def run_child(
    command: Sequence[str | Path],
    *,
    log: Path,
    timeout_s: float,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> float:
    """Run a command and return its seconds; its output goes to `log`. Raises ChildFailed.

    However this ends, the command is ended too: first with SIGTERM, so that it ends its own
    children.
    """
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            cwd=cwd,
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(_explain(words, f"still ran after {timeout_s:.0f} s", log)) from error
        finally:
            _end(child)
    if code:
        raise ChildFailed(_explain(words, f"ended with exit code {code}", log))
    return time.monotonic() - started


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_END_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _explain(words: list[str], what: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"{' '.join(words)}\n{what}. The end of {log}:", *lines])
