"""Compares a program's output with the expected output: table OUTPUT_COMPARISONS.

Pure functions of bytes, because output may be invalid text. Linear in the output's size.
"""

import math
import re
from collections.abc import Callable

_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?")


def is_same_exactly(output: bytes, expected: bytes, tolerance: float) -> bool:
    """Every byte is equal."""
    return output == expected


def is_same_but_for_space(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal; spacing may differ."""
    return output.split() == expected.split()


def is_same_within_tolerance(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal, or finite numbers within an absolute or relative `tolerance`."""
    given, wanted = output.split(), expected.split()
    return len(given) == len(wanted) and all(
        one == other or _is_near(one, other, tolerance)
        for one, other in zip(given, wanted, strict=True)
    )


def _is_near(given: bytes, wanted: bytes, tolerance: float) -> bool:
    # float() also accepts "nan", "1_000" and digits of other scripts.
    if not _NUMBER.fullmatch(given) or not _NUMBER.fullmatch(wanted):
        return False
    first, second = float(given), float(wanted)
    if not math.isfinite(first) or not math.isfinite(second):
        return False
    return abs(first - second) <= tolerance * max(1.0, abs(second))


OutputComparison = Callable[[bytes, bytes, float], bool]

OUTPUT_COMPARISONS: dict[str, OutputComparison] = {
    "exact": is_same_exactly,
    "whitespace": is_same_but_for_space,
    "float": is_same_within_tolerance,
}
CHECKER = "checker"
"""Comparison by the tests' own program."""
