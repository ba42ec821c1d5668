"""Prints plain lines, tables, texts of models, and the progress of long work.

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

from rich.cells import cell_len
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
from rich.table import Column, Table

from megatron_rl.config.errors import InputError

Item = TypeVar("Item")
PLAIN_S = 10.0
"""Seconds between two lines without a terminal."""
_FILE_WIDTH = 10_000
_FRAME = 3
"""Width of a column's line and two blanks in a table."""
_WHOLE_WORD = 32
"""Longest word, in characters, that a table never breaks."""
Report = Callable[[int, int | None], None]
"""f(done, total); total is None while unknown."""


def say(console: Console, *lines: str) -> None:
    """Print lines unchanged: rich does not wrap or color them, and reads no markup."""
    for line in lines:
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def open_console(*, stderr: bool = False) -> Console:
    """The console of a command, which prints `:100:` in a text as it is.

    Tests allow no other console: rich puts emojis for such codes into lines and tables.
    """
    return Console(stderr=stderr, emoji=False)


def show_table(console: Console, table: Table) -> None:
    """Print the table without cutting a number; cells are plain texts.

    Without a terminal each row is one line, as wide as it needs. On a narrow terminal texts fold at
    blanks, and words longer than _WHOLE_WORD anywhere.
    """
    # rich would leave out columns for which the terminal has no room.
    needed = sum(_keep_words(column) for column in table.columns)
    if not console.is_terminal:
        unbound = console.options.update(max_width=_FILE_WIDTH, markup=False)
        table.width = console.measure(table, options=unbound).maximum
    elif needed > console.width:
        table.width = needed
    console.print(table, markup=False, emoji=False, crop=False)


def _keep_words(column: Column) -> int:
    """Let the column fold at blanks alone; returns the width that it needs, with its frame."""
    texts = [str(cell) for cell in (column.header, *column.cells)]
    words = [cell_len(word) for text in texts for word in text.split()]
    column.overflow = "fold"
    column.min_width = max((size for size in words if size <= _WHOLE_WORD), default=1)
    if all(cell_len(line) <= column.min_width for text in texts for line in text.splitlines()):
        # rich then takes the missing width from other columns.
        column.no_wrap = True
    return column.min_width + _FRAME


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
