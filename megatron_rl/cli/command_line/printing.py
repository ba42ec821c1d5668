"""Prints plain lines, texts of models, and the progress of long work.

Used by commands, the launcher and views of a run. One thread: a bar is drawn only when the work
reports `(done, total)`.
"""

import contextlib
import errno
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_rl.config.errors import InputError

Item = TypeVar("Item")
PLAIN_S = 10.0
"""Seconds between two lines without a terminal."""
Report = Callable[[int, int | None], None]
"""f(done, total); total is None while unknown."""


def printable(text: str) -> str:
    """The text with blanks for characters that could move the cursor or change colors."""
    return "".join(char if char.isprintable() else " " for char in text)


def say(console: Console, *lines: str) -> None:
    """Print lines unchanged: rich does not wrap or color them, and reads no markup."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def outlive_terminal() -> Iterator[None]:
    """Go on without output, inside, when the terminal or the reader of a pipe is gone."""
    with contextlib.redirect_stdout(cast(TextIO, _LastingOutput(sys.stdout))):
        yield


class _LastingOutput:
    """Standard output that turns to nowhere when it is closed at the other end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._do(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._file.flush)

    def _do(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            # Python flushes what is left when it ends, which must not fail either.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)


@contextmanager
def progress(
    console: Console, what: str, *, in_bytes: bool = False, clock: Callable[[], float] = time.time
) -> Iterator[Report]:
    """Yield the function to which the work reports. A terminal shows a bar until the end."""
    if not console.is_terminal:
        yield _Lines(console, what, clock, in_bytes=in_bytes).report
        return
    middle: list[ProgressColumn] = [MofNCompleteColumn()]
    if in_bytes:
        middle = [DownloadColumn(), TransferSpeedColumn()]
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(*columns, *middle, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def counted(items: Iterable[Item], total: int | None, report: Report) -> Iterator[Item]:
    """The items; each is reported when the next one is taken."""
    report(0, total)
    for done, item in enumerate(items, 1):
        yield item
        report(done, total)


def check_plots(otherwise: str) -> None:
    """Raise InputError without matplotlib, which is not loaded. otherwise: how to have no plots."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plots need matplotlib, which is not installed: install the version in "
            f"requirements/cpu.txt, or {otherwise}"
        )


class _Lines:
    """Prints progress at most every PLAIN_S, so nothing for shorter work."""

    def __init__(
        self, console: Console, what: str, clock: Callable[[], float], *, in_bytes: bool
    ) -> None:
        self._console = console
        self._what = what
        self._clock = clock
        self._unit, self._digits = (1e9, 2) if in_bytes else (1, 0)
        self._started = self._said = clock()

    def report(self, done: int, total: int | None) -> None:
        now = self._clock()
        if now - self._said < PLAIN_S:
            return
        self._said = now
        text = f"{self._what}: {self._number(done)}"
        if total:
            text += f" of {self._number(total)} ({done / total:.0%})"
            if done:
                left_s = (now - self._started) * (total - done) / done
                text += f", {left_s:.0f} s left"
        say(self._console, text)

    def _number(self, value: int) -> str:
        unit = " GB" if self._unit > 1 else ""
        return f"{value / self._unit:,.{self._digits}f}{unit}"
