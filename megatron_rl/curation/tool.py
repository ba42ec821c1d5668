"""Parts of all data tools: checks of options, seeded draws, the report.

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
    """Empty if the row could not be read as a prompt."""
    place: str
    """As file:line."""
    reason: str
    detail: str = ""
    """For people: the other row of a pair, or the share that was too low."""


class Outcome(NamedTuple):
    """A tool's rows and report."""

    rows: list[Any]
    report: "Report"


class Report(msgspec.Struct):
    """Counts of one call of a tool: read + added - dropped = written."""

    tool: str
    options: dict[str, Any]
    read: int
    """Rows of the input."""
    written: int = 0
    """Rows of the output."""
    dropped: dict[str, int] = {}
    """By reason."""
    added: Counter[str] = msgspec.field(default_factory=Counter)
    """Further rows of the output, by kind."""
    changed: Counter[str] = msgspec.field(default_factory=Counter)
    """Changed rows by kind of change; a row may count in several."""
    figures: dict[str, Any] = {}
    drops: list[Drop] = []

    def drop(self, prompt: Prompt, reason: str, detail: str = "") -> None:
        """Count a dropped row."""
        self.drops.append(Drop(prompt.id, prompt.place, reason, detail))

    def count_drops(self) -> dict[str, int]:
        """Drops by reason, the most frequent first."""
        return _ranked(Counter(drop.reason for drop in self.drops))

    def outcome(self, rows: list[Any]) -> Outcome:
        """The rows and the whole report; asserts that every row was kept, added or dropped."""
        self.written, self.dropped = len(rows), self.count_drops()
        expected = self.read + self.added.total() - len(self.drops)
        assert expected == self.written, (self.read, self.added, self.dropped)
        self.added, self.changed = _ranked(self.added), _ranked(self.changed)
        return Outcome(rows, self)


def _ranked(counts: Counter[str]) -> Counter[str]:
    """Counts above 0, the highest first."""
    return Counter(dict((+counts).most_common()))
