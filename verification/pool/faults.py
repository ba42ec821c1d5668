"""What comes of an item whose attempts failed: a rule of the list of its faults.

Used by `worker_pool.py` and by grading processes, which name the faults.
"""

import enum
from collections import Counter
from collections.abc import Sequence

HOST = "host"
"""The host gave an attempt no time or no memory; says nothing about the completion."""
TIMEOUT = "grading_timeout"
MAX_ATTEMPTS = 3
# What hostile text can do to a process. That it exits by itself is not among them: only our code
# and the user's call exit(), so that a bug there is never taken for a wrong answer.
MODEL_FAULTS = frozenset({TIMEOUT, "grading_memory", "grading_depth", "grading_crash"})


_KEPT_DETAILS = 256
"""Different details that are counted; those beyond are told one by one."""


class Repetitions:
    """Which details of failed attempts are worth a line: the 1st, 10th, 100th ... of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, detail: str) -> str:
        """Count a detail; returns what to log, empty for a repetition that tells nothing new."""
        if detail not in self._counts and len(self._counts) >= _KEPT_DETAILS:
            return detail
        self._counts[detail] += 1
        count = self._counts[detail]
        if count == 1:
            return detail
        is_power_of_ten = str(count).rstrip("0") == "1"
        return f"{detail} ({count:,} times so far)" if is_power_of_ten else ""


class Outcome(enum.Enum):
    """What is done with an item after an attempt failed."""

    RETRY = enum.auto()
    SCORE = enum.auto()
    """The completion's fault: format and length alone count, and the last fault is the reason."""
    NOT_GRADED = enum.auto()
    """The host's fault."""
    FAILED = enum.auto()
    """Our own fault."""


def judge(faults: Sequence[str]) -> Outcome:
    """What to do after these faults, oldest first.

    The same fault twice, in two processes, is the item's and not chance.
    """
    last = faults[-1]
    is_repeated = faults.count(last) > 1
    if is_repeated and last in MODEL_FAULTS:
        return Outcome.SCORE
    if not is_repeated and len(faults) < MAX_ATTEMPTS:
        return Outcome.RETRY
    return Outcome.NOT_GRADED if HOST in faults else Outcome.FAILED


def judge_unfinished(faults: Sequence[str]) -> Outcome:
    """What to do with an item for which no time is left."""
    # It had its share of CPU time once, whatever kept its second attempt waiting.
    return Outcome.SCORE if TIMEOUT in faults else Outcome.NOT_GRADED
