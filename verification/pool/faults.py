"""What comes of an item whose attempts failed: a rule of the list of its faults.

Used by `lane.py` and by grading processes, which name the faults.
"""

import enum
from collections.abc import Sequence

HOST = "host"
"""The host gave an attempt no time or no memory; says nothing about the completion."""
TIMEOUT = "grading_timeout"
MAX_ATTEMPTS = 3
# What hostile text can do to a process. That it exits by itself is not among them: only our code
# and the user's call exit(), so that a bug there is never taken for a wrong answer.
MODEL_FAULTS = frozenset({TIMEOUT, "grading_memory", "grading_depth", "grading_crash"})


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
