"""The verdict on an answer, before it becomes a reward."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether an answer is right, and why not."""

    is_correct: bool
    reason: str
    """"correct", "wrong_answer", or why the answer could not be compared."""
    tests: tuple[int, int] = (0, 0)
    """Tests that a program passed, and all there were, where they were counted."""
    detail: str = ""
    """For readers: the test that a program failed first, and what it printed."""


CORRECT = Verdict(True, "correct")
WRONG = Verdict(False, "wrong_answer")
# No parser and no number of digits could tell; never paid.
UNDECIDED = Verdict(False, "undecided")


class GradingError(RuntimeError):
    """Our own failure to grade: a bad reference, an unknown task, a broken scorer."""


class HostBusy(GradingError):
    """The host gave no time or no memory to grade: to be tried again when it is quieter."""
