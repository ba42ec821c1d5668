"""What a data tool did to its rows: counts, and the reason for every row that it dropped.

Printed as a table and written beside the output by `cli/data_tools/files.py`.
"""

from collections import Counter
from typing import Any

import msgspec

from megatron_rl.protocol.types import Prompt


class Drop(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row that is not in the output."""

    id: str
    place: str
    """Where it was read, as file:line."""
    reason: str
    detail: str = ""
    """For people: the other row of a pair, the share that was too low."""


class Report(msgspec.Struct, frozen=True):
    """Of one call of a tool. read + added - dropped = written."""

    tool: str
    options: dict[str, Any]
    read: int
    """Rows of the input."""
    written: int
    """Rows of the output."""
    dropped: dict[str, int]
    """By reason."""
    added: dict[str, int]
    """Rows of the output beyond one for each row that was kept, by kind."""
    changed: dict[str, int]
    """Kept rows that are not as they were, by what was done; a row may count in several."""
    figures: dict[str, Any]
    """What else the tool found."""
    drops: list[Drop]
    """Each dropped row."""


class Tally:
    """Counts while a tool goes over its rows."""

    def __init__(self, tool: str, options: dict[str, Any], *, read: int) -> None:
        self._tool = tool
        self._options = options
        self._read = read
        self._drops: list[Drop] = []
        self.added: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.figures: dict[str, Any] = {}

    def drop(self, prompt: Prompt, reason: str, detail: str = "") -> None:
        """Count a row that is not kept."""
        self._drops.append(Drop(prompt.id, prompt.place, reason, detail))

    def drop_item(self, name: str, place: str, reason: str) -> None:
        """The same for what is no prompt."""
        self._drops.append(Drop(name, place, reason))

    def dropped_text(self) -> str:
        """What was dropped, in words."""
        counts = Counter(drop.reason for drop in self._drops).most_common()
        return ", ".join(f"{count} {reason}" for reason, count in counts) or "nothing was dropped"

    def report(self, *, written: int) -> Report:
        """The report; every row must have been kept, added or dropped."""
        dropped = Counter(drop.reason for drop in self._drops)
        added = self.added.total()
        assert self._read + added - dropped.total() == written, (self._read, added, dropped)
        return Report(
            tool=self._tool,
            options=self._options,
            read=self._read,
            written=written,
            dropped=dict(dropped.most_common()),
            added={name: n for name, n in self.added.most_common() if n},
            changed={name: n for name, n in self.changed.most_common() if n},
            figures=self.figures,
            drops=self._drops,
        )
