"""Whether the output of a program is the expected one: table OUTPUT_COMPARISONS.

Pure functions of bytes: model output need not be text. Linear in the size of the output.
"""

import math
import re
from collections.abc import Callable

_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?")


def is_same_exactly(output: bytes, expected: bytes, tolerance: float) -> bool:
    """Every byte is equal."""
    return output == expected


def is_same_but_for_space(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal, however they are spaced."""
    return output.split() == expected.split()


def is_same_within_tolerance(output: bytes, expected: bytes, tolerance: float) -> bool:
    """The words are equal, or finite numbers apart by an absolute or relative `tolerance`."""
    given, wanted = output.split(), expected.split()
    return len(given) == len(wanted) and all(
        one == other or _is_near(one, other, tolerance)
        for one, other in zip(given, wanted, strict=True)
    )


def _is_near(given: bytes, wanted: bytes, tolerance: float) -> bool:
    # float() takes more than numbers: "nan", "1_000", digits of other scripts.
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
"""Name of the comparison by a program that comes with the tests."""
