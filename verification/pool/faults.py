"""Faults of failed grading attempts, and what to do with an item after them.

Used by `worker_pool.py` and by grading processes.
"""

import enum
from collections import Counter
from collections.abc import Sequence

HOST = "host"
"""The host lacked time or memory for an attempt; not the completion's fault."""
WAITED = "waited"
"""A user's function waited for something else, such as a judge under load, until its limit."""
TIMEOUT = "grading_timeout"
MAX_ATTEMPTS = 3
# Faults that hostile text can cause. A process's own exit is not among them: only our code and the
# user's call exit(), and a bug there must not count as a wrong answer.
MODEL_FAULTS = frozenset({TIMEOUT, "grading_memory", "grading_depth", "grading_crash"})
_KEPT_DETAILS = 256
"""Different details to count; further ones are logged each time."""


class Repetitions:
    """Thins log lines of failed attempts: the 1st, 10th, 100th ... of each detail."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, detail: str) -> str:
        """Count a detail and return the text to log; empty for nothing."""
        if detail not in self._counts and len(self._counts) >= _KEPT_DETAILS:
            return detail
        self._counts[detail] += 1
        count = self._counts[detail]
        if count == 1:
            return detail
        is_power_of_ten = str(count).rstrip("0") == "1"
        return f"{detail} ({count:,} times so far)" if is_power_of_ten else ""


class Outcome(enum.Enum):
    """The next action for an item after a failed attempt."""

    RETRY = enum.auto()
    SCORE = enum.auto()
    """The completion's fault: score format and length only, with the last fault as the reason."""
    NOT_GRADED = enum.auto()
    """The fault of the host, or of what a user's function waited for."""
    FAILED = enum.auto()
    """Our own fault."""


def judge(faults: Sequence[str]) -> Outcome:
    """Action after these faults, oldest first.

    The same fault in two processes is the item's fault, not chance.
    """
    last = faults[-1]
    is_repeated = faults.count(last) > 1
    if is_repeated and last in MODEL_FAULTS:
        return Outcome.SCORE
    if not is_repeated and len(faults) < MAX_ATTEMPTS:
        return Outcome.RETRY
    return Outcome.FAILED if {HOST, WAITED}.isdisjoint(faults) else Outcome.NOT_GRADED


def judge_unfinished(faults: Sequence[str]) -> Outcome:
    """Action for an item whose deadline has passed."""
    # The item used its CPU time once, so its second attempt need not run.
    return Outcome.SCORE if TIMEOUT in faults else Outcome.NOT_GRADED
