"""Parts of all data tools: checks of options, seeded draws, counts of rows, the report.

`cli/data_tools/files.py` prints the report as a table and writes it next to the output.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.types import Prompt

Progress = Callable[[int, int], None]
"""f(done, total)"""


def no_progress(done: int, total: int) -> None:
    """Default of `Progress`."""


def check_share(name: str, value: float, *, low: float = 0.0, high: float = 1.0) -> None:
    """Raise InputError unless low <= value <= high; NaN is refused too."""
    if not low <= value <= high:
        raise InputError(f"{name}={value:g}: expected a share from {low:g} to {high:g}")


def check_at_least(name: str, value: float, low: float) -> None:
    """Raise InputError unless value >= low."""
    if not value >= low:
        raise InputError(f"{name}={value:g}: expected at least {low:g}")


def place_of(seed: int, *names: str) -> float:
    """A number in [0, 1) that depends only on seed and names, not on the order of rows."""
    digest = hashlib.sha256("\0".join((str(seed), *names)).encode(errors="backslashreplace"))
    return int.from_bytes(digest.digest()[:6], "big") / 2**48


class Drop(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row that is not in the output."""

    id: str
    place: str
    """As file:line."""
    reason: str
    detail: str = ""
    """For people: the other row of a pair, or the share that was too low."""


class Report(msgspec.Struct, frozen=True):
    """Counts of one call of a tool: read + added - dropped = written."""

    tool: str
    options: dict[str, Any]
    read: int
    """Rows of the input."""
    written: int
    """Rows of the output."""
    dropped: dict[str, int]
    """By reason."""
    added: dict[str, int]
    """Further rows of the output, by kind."""
    changed: dict[str, int]
    """Changed rows by kind of change; a row may count in several."""
    figures: dict[str, Any]
    drops: list[Drop]


class Outcome(NamedTuple):
    """A tool's rows and report."""

    rows: list[Any]
    report: Report


class Tally:
    """Counts while a tool reads its rows."""

    def __init__(self, tool: str, options: dict[str, Any], *, read: int) -> None:
        self._tool = tool
        self._options = options
        self._read = read
        self._drops: list[Drop] = []
        self.added: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.figures: dict[str, Any] = {}

    def drop(self, prompt: Prompt, reason: str, detail: str = "") -> None:
        """Count a dropped row."""
        self._drops.append(Drop(prompt.id, prompt.place, reason, detail))

    def drop_item(self, name: str, place: str, reason: str) -> None:
        """Count a dropped item that is not a prompt."""
        self._drops.append(Drop(name, place, reason))

    def dropped_text(self) -> str:
        """Counts of drops, for people."""
        counts = Counter(drop.reason for drop in self._drops).most_common()
        return ", ".join(f"{count} {reason}" for reason, count in counts) or "nothing was dropped"

    def outcome(self, rows: list[Any]) -> Outcome:
        """The rows and the report; asserts that every row was kept, added or dropped."""
        dropped = Counter(drop.reason for drop in self._drops)
        expected = self._read + self.added.total() - dropped.total()
        assert expected == len(rows), (self._read, self.added, dropped)
        report = Report(
            tool=self._tool,
            options=self._options,
            read=self._read,
            written=len(rows),
            dropped=dict(dropped.most_common()),
            added={name: n for name, n in self.added.most_common() if n},
            changed={name: n for name, n in self.changed.most_common() if n},
            figures=self.figures,
            drops=self._drops,
        )
        return Outcome(rows, report)
