"""Which answers of one prompt are the same: a clustering that asks for one comparison at a time.

Pure; used by the verifier, whose `class_desk.py` has the comparisons made. Answers are taken in
order. Each is compared with the first answer of each class, oldest first, joins the first class
that takes it, or founds one. So n answers of c classes cost at most n * c comparisons, and where
sameness is not transitive (5 is 5 m and 5 s, which differ) the order decides. An answer that is
letter by letter one that came before is not compared.

A comparison that exceeds a limit of grading says not which of the two is to blame: they count as
different. After MAX_FAULTS of these an answer is compared with no more founders and is a class of
its own, and a founder of which no comparison ever ended is compared no more. So there are at most
MAX_FAULTS * n of them, and far fewer where answers hang whatever they are compared with.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.protocol.class_messages import NO_ANSWER

MAX_FAULTS = 2
"""Comparisons of an answer that may exceed a limit: one may be the other answer's fault."""


class Pair(NamedTuple):
    """Two answers to be compared."""

    answer: int
    """Its place."""
    founder: int
    """Place of the answer that stands for its class."""


class Clustering:
    """The classes of some answers, as far as they are known."""

    def __init__(self, answers: Sequence[str | None], *, compares: bool = True) -> None:
        """None: there is no answer. compares: answers of different text may be the same."""
        self._answers = answers
        self._compares = compares
        self.classes: list[int] = []
        """Of the first answers; of all when `advance` returns None."""
        self._founders: list[int] = []
        """By class, the place of its first answer."""
        self._class_of: dict[str, int] = {}
        """Of each text that has come."""
        self._compared = 0
        """Founders that the answer whose turn it is has been compared with."""
        self._faults: Counter[int] = Counter()
        """By place, comparisons that exceeded a limit."""
        self._sound: set[int] = set()
        """Places of answers of which a comparison has ended."""

    def advance(self) -> Pair | None:
        """What is to be compared next; None when all classes are known."""
        while (place := len(self.classes)) < len(self._answers):
            answer = self._answers[place]
            if answer is None:
                self._settle(NO_ANSWER)
            elif answer in self._class_of:
                self._settle(self._class_of[answer])
            elif (founder := self._next_founder(place)) is not None:
                return Pair(place, founder)
            else:
                self._founders.append(place)
                self._settle(len(self._founders) - 1)
        return None

    def note(self, *, is_same: bool) -> None:
        """Take in what came of the pair that `advance` has returned."""
        self._sound.update(self._pair())
        if is_same:
            self._settle(self._compared)
        else:
            self._compared += 1

    def note_fault(self) -> None:
        """Comparing that pair exceeded a limit."""
        self._faults.update(self._pair())
        self._compared += 1

    def _pair(self) -> Pair:
        pair = self.advance()
        assert pair is not None
        return pair

    def _next_founder(self, place: int) -> int | None:
        if not self._compares or self._faults[place] >= MAX_FAULTS:
            return None
        while self._compared < len(self._founders):
            founder = self._founders[self._compared]
            if founder in self._sound or self._faults[founder] < MAX_FAULTS:
                return founder
            self._compared += 1
        return None

    def _settle(self, found: int) -> None:
        answer = self._answers[len(self.classes)]
        if answer is not None:
            self._class_of[answer] = found
        self.classes.append(found)
        self._compared = 0
