"""The verdict on an answer, before it becomes a reward."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether an answer is right, and why not."""

    is_correct: bool
    reason: str
    """"correct", "wrong_answer", or why the answer could not be compared."""
    tests: tuple[int, int] = (0, 0)
    """Tests that a program passed, and number of tests, if counted."""
    detail: str = ""
    """For readers: the first test that a program failed, and its output."""


CORRECT = Verdict(True, "correct")
WRONG = Verdict(False, "wrong_answer")
# No parser and no number of digits could tell; never paid.
UNDECIDED = Verdict(False, "undecided")


class GradingError(RuntimeError):
    """Our own failure to grade: a bad reference, an unknown task, a broken scorer."""


class HostBusy(GradingError):
    """The host had no time or memory for grading; retry when it is quieter."""
