"""Compares a program's output with the expected output: table OUTPUT_COMPARISONS.

Pure functions of bytes, because output may be invalid text. Linear in the output's size.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal

# One way to match each text: the output is hostile, and backtracking would be quadratic.
_NUMBER = re.compile(rb"[+-]?(\d+(?:\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?")
_INTEGER = re.compile(r"[+-]?\d+")


def is_same_exactly(output: bytes, expected: bytes, tolerance: float) -> bool:
    """Every byte is equal."""
    return output == expected


def is_same_but_for_space(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal; spacing may differ."""
    return output.split() == expected.split()


def is_same_number(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal, or numbers of exactly the same value: 0.50 and 0.5."""
    return _agree(output, expected, lambda one, other: Decimal(one) == Decimal(other))


def is_same_within_tolerance(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal, or numbers within an absolute or relative `tolerance`.

    Two integers are equal only if all digits are.
    """

    def is_near(one: float, other: float) -> bool:
        return abs(one - other) <= tolerance * max(1.0, abs(other))

    return _agree(output, expected, _of_floats(is_near))


def is_same_within_distance(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal in any case, or numbers less than `tolerance` apart."""

    def is_near(one: float, other: float) -> bool:
        return abs(one - other) < tolerance

    return _agree(output.lower(), expected.lower(), _of_floats(is_near))


def _agree(output: bytes, expected: bytes, is_same: Callable[[str, str], bool]) -> bool:
    """Whether all words are equal, or numbers that are the same by `is_same`."""
    given, wanted = output.split(), expected.split()
    return len(given) == len(wanted) and all(
        one == other
        # float() and Decimal() also accept "nan", "1_000" and digits of other scripts.
        or (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)
            and is_same(one.decode(), other.decode()))
        for one, other in zip(given, wanted, strict=True)
    )  # fmt: skip


def _of_floats(is_near: Callable[[float, float], bool]) -> Callable[[str, str], bool]:
    """Comparison of two numbers as text: integers by their digits, others as finite floats."""

    def is_same(one: str, other: str) -> bool:
        if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
            return Decimal(one) == Decimal(other)
        first, second = float(one), float(other)
        return math.isfinite(first) and math.isfinite(second) and is_near(first, second)

    return is_same


OutputComparison = Callable[[bytes, bytes, float], bool]

OUTPUT_COMPARISONS: dict[str, OutputComparison] = {
    "exact": is_same_exactly,
    "whitespace": is_same_but_for_space,
    "number": is_same_number,
    "float": is_same_within_tolerance,
    "distance": is_same_within_distance,
}
CHECKER = "checker"
"""Comparison by the tests' own program."""
