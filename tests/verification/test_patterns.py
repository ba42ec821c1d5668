"""No pattern of the verifier tries exponentially many readings of a text.

The verifier matches completions in its only thread, where no limit of time ends a pattern.
"""

import random
import re
import signal
import sys
from collections.abc import Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from verification import worker
from verification.code.languages import LANGUAGES, find_language
from verification.math.answer import compare_quickly
from verification.verdict import CORRECT

REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
ASSERTIONS = (_constants.ASSERT, _constants.ASSERT_NOT)
CHARS = "1 a0A.,-\\{}()[]bxz=+/*^_$;:\n\"'|<>~!é中"
PUMPS = 40
"""Repetitions, of which an exponential pattern would try 2^40 partitions."""
LONGEST = 600
LIMIT_S = 0.5
"""CPU time of one match; other patterns need milliseconds."""
DRAWS = 12


class TooSlow(Exception):
    """A match exceeded LIMIT_S."""


def patterns() -> dict[tuple[str, int], str]:
    """(pattern, flags) -> where it is, of all that the modules of a verifier hold."""
    found: dict[tuple[str, int], str] = {}
    assert worker.__name__ in sys.modules
    for name, module in sorted(sys.modules.items()):
        for key, value in vars(module).items() if name.startswith("verification.") else ():
            inner = value.values() if isinstance(value, dict) else value
            many = inner if isinstance(value, list | tuple | dict) else [value]
            flat = [y for x in many for y in (x if isinstance(x, tuple) else [x])]
            for one in flat:
                if isinstance(one, re.Pattern) and isinstance(one.pattern, str):
                    found[one.pattern, one.flags & ~re.UNICODE] = f"{name}.{key}"
    for language, spec in LANGUAGES.items():
        found[spec.versions, 0] = f"versions of {language}"
    return found


def parts(tree: Any) -> Iterator[tuple[bool, Any]]:
    """(whether it is the body of a repetition, part) of a syntax tree, at all depths."""
    for operation, value in tree:
        bodies: list[Any] = []
        if operation in REPEATS:
            bodies = [value[2]]
        elif operation is _constants.BRANCH:
            bodies = value[1]
        elif operation is _constants.SUBPATTERN:
            bodies = [value[3]]
        elif operation is _constants.ATOMIC_GROUP:
            bodies = [value]
        elif operation in ASSERTIONS:
            bodies = [value[1]]
        for body in bodies:
            yield operation in REPEATS, body
            yield from parts(body)


def holds(tree: Any, target: Any) -> bool:
    """Whether a syntax tree is, or contains, the part `target`."""
    return tree is target or any(part is target for _, part in parts(tree))


class Writer:
    """Writes texts that a pattern matches, or nearly so."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._chars: dict[int, list[str]] = {}

    def write(self, tree: Any, target: Any) -> str:
        """A text of the tree in which the repetition of `target` is pumped."""
        return "".join(self._part(tree, item, target) for item in tree)

    def _part(self, tree: Any, item: tuple[Any, Any], target: Any) -> str:
        operation, value = item
        if operation in REPEATS:
            return self._repeated(*value, target)
        if operation is _constants.BRANCH:
            fitting = [one for one in value[1] if holds(one, target)]
            return self.write(self._draw.choice(fitting or value[1]), target)
        if operation is _constants.SUBPATTERN:
            return self.write(value[3], target)
        if operation is _constants.ATOMIC_GROUP:
            return self.write(value, target)
        if operation in ASSERTIONS:
            return self.write(value[1], target) if holds(value[1], target) else ""
        if operation in (_constants.AT, _constants.GROUPREF):
            return ""
        return self._draw.choice(self._fitting(tree, item))

    def _repeated(self, low: int, high: int, body: Any, target: Any) -> str:
        if body is not target:
            count = self._draw.randint(low, min(low + 1, int(high)))
            count = max(count, 1) if holds(body, target) else count
            return "".join(self.write(body, target) for _ in range(count))
        count = min(int(high), PUMPS)
        if self._draw.random() < 0.5:
            return self.write(body, None) * count
        return "".join(self.write(body, None) for _ in range(count))

    def _fitting(self, tree: Any, item: tuple[Any, Any]) -> list[str]:
        """Some characters that a part of one character matches."""
        if id(item) not in self._chars:
            if item[0] is _constants.LITERAL:
                found = [chr(item[1])]
            else:
                one = _compiler.compile(_parser.SubPattern(tree.state, [item]), tree.state.flags)
                found = [char for char in CHARS if one.fullmatch(char)][:4]
            self._chars[id(item)] = found or ["a"]
        return self._chars[id(item)]


def slow_text(source: str, flags: int) -> str | None:
    """A text on which a pattern exceeds LIMIT_S; None for none."""
    pattern, tree = re.compile(source, flags), _parser.parse(source, flags)
    writer = Writer(random.Random(0))
    targets = [part for is_repeated, part in parts(tree) if is_repeated]
    for target in targets:
        texts = {writer.write(tree, target)[:LONGEST] for _ in range(DRAWS)}
        for text in sorted(text + end for text in texts for end in ("", "\x01", "x")):
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
            try:
                pattern.fullmatch(text)
                pattern.search(text)
            except TooSlow:
                return text
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


@pytest.fixture
def limited() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, end)
    yield
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    "source",
    [
        r"3(\.?\d+)*|3\.x",
        r"(?:[0-9]+|[\s,;]){1,40}",
        r"1\{,\}(?:\\!|\\negthinspace ?|[ {}])*[0-9]{3}",
        r"(?:[bn]?(?:[aeiou]o|[aeiou]n|[aeiou]))+",
        r"(?:k(?=[ks])?(?:ts|[kst])?[au]|t?(?:ts|s)u)+",
    ],
)
def test_exponential_patterns_are_found(source: str) -> None:
    assert slow_text(source, 0) is not None


@pytest.mark.usefixtures("limited")
def test_no_pattern_is_exponential() -> None:
    found = patterns()
    assert len(found) > 300
    slow = {where: slow_text(*pattern) for pattern, where in found.items()}
    assert {where: text for where, text in slow.items() if text is not None} == {}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"1267650600228229401496703205376 \quad (=2^{100})", "7"),
        ("10888869450418352160768000000\n(27!)", "7"),
        ("1{,}" + "\\negthinspace " * 40 + "x", "7"),
    ],
)
def test_answers_are_read_at_once(answer: str, reference: str) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        assert compare_quickly(answer, reference) != CORRECT
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@pytest.mark.usefixtures("limited")
def test_tags_of_fences_are_read_at_once() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        assert find_language("python3" + "1" * 40 + "x") is None
        assert find_language("python3.11") == find_language("py3.x") == "python"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
