"""Rows of docs/gpu-evidence.md: their tests and their figures. Pure functions."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SCRIPT = "tools/test.sh"
COLUMNS = ("claim", "command", "hardware", "date", "figure")
_BACKTICKS = re.compile(r"`([^`]*)`")
_CELLS = re.compile(r"(?<!\\)\|")


class Row(NamedTuple):
    """A claim and its tests."""

    claim: str
    command: str
    """The whole cell."""
    path: str
    """File of tests; "": the command names none, or does not run `tools/test.sh`."""
    words: tuple[str, ...]
    """The row's tests have one of these words in their names; (): all tests of the file."""

    def takes(self, test: str) -> bool:
        """Whether a test, by its node id, belongs to the row."""
        path, _, name = test.partition("::")
        if not self.path or path != self.path:
            return False
        if name == "*":
            return True
        return not self.words or any(word in name.lower() for word in self.words)


@dataclass
class Outcome:
    """Outcome of a test."""

    result: str
    """passed, failed, skipped, or hung (killed, or crashed its process)."""
    seconds: float = 0.0
    text: str = ""
    """Error or reason of a skip."""
    figures: list[str] = field(default_factory=list)
    """Values of the test's property "figure"."""


def read_rows(page: str) -> list[Row]:
    """Rows of the page's only table, in order."""
    lines = [line for line in page.splitlines() if line.startswith("|")][2:]
    rows = []
    for line in lines:
        cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"a row of {len(cells)} columns instead of {len(COLUMNS)}: {line}")
        rows.append(Row(cells[0], cells[1], *_selection(cells[1])))
    return rows


def _selection(command: str) -> tuple[str, tuple[str, ...]]:
    """(file, words) of the first command in backticks that runs tests."""
    for text in _BACKTICKS.findall(command):
        words = shlex.split(text)
        if SCRIPT not in words:
            continue
        arguments = words[words.index(SCRIPT) + 1 :]
        chosen: tuple[str, ...] = ()
        if "-k" in arguments:
            chosen = tuple(arguments[arguments.index("-k") + 1].lower().split(" or "))
        path = next((word for word in arguments if word.endswith(".py")), "")
        return path, chosen
    return "", ()


def describe(row: Row, outcomes: Mapping[str, Outcome]) -> str:
    """The row's last column from the outcomes of its tests, by node id."""
    found = [outcome for test, outcome in outcomes.items() if row.takes(test)]
    if not found:
        return "not yet run"
    counts = {name: [o for o in found if o.result == name] for name in _RESULTS}
    told = [f"{len(of)} {name}" for name, of in counts.items() if of]
    seconds = sum(outcome.seconds for outcome in found)
    parts = [f"{', '.join(told)} in {seconds:.0f} s"]
    parts += [figure for outcome in counts["passed"] for figure in outcome.figures]
    first = next(
        (o for name in ("failed", "hung", "skipped") for o in counts[name] if o.text), None
    )
    if first is not None:
        parts.append(_cell(first.text))
    return "; ".join(parts)


_RESULTS = ("passed", "failed", "hung", "skipped")


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")[:200]


def table(rows: Sequence[Row], outcomes: Mapping[str, Outcome], hardware: str, date: str) -> str:
    """Rows with outcomes, to paste over the page's."""
    lines = []
    for row in rows:
        figure = describe(row, outcomes)
        if figure != "not yet run":
            lines.append(f"| {row.claim} | {row.command} | {hardware} | {date} | {figure} |")
    return "\n".join(lines)
