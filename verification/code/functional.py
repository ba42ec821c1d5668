"""Cases that are calls: arguments as lines of JSON, the result as JSON (LiveCodeBench's form).

Runs where prompts are checked and in grading processes. Cases become unit tests, so that expected
results stay out of the solution's process.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from verification.code.output_comparison import CHECKER

MAX_DIGITS = 100_000
"""Of an integer in JSON: Python's time for one grows with the square of its digits."""
_SOURCE = """
import json
import math

CASES = json.loads({cases!r})
TOLERANCE = {tolerance!r}
MAY_BE_WRAPPED = {may_be_wrapped!r}


def is_same(given, expected):
    if type(given).__module__ == "numpy":
        given = given.tolist()
    if isinstance(expected, list):
        is_list = isinstance(given, (list, tuple)) and len(given) == len(expected)
        return is_list and all(map(is_same, given, expected))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(given) != len(expected):
            return False
        named = {{str(key): item for key, item in given.items()}}
        return named.keys() == expected.keys() and all(
            is_same(item, expected[name]) for name, item in named.items()
        )
    if isinstance(expected, bool) or isinstance(given, bool) or expected is None:
        return given is expected
    if isinstance(expected, str):
        return isinstance(given, str) and given == expected
    if not isinstance(given, (int, float)):
        return False
    if expected != expected:
        return given != given
    if given == expected:
        return True
    is_exact = TOLERANCE is None or isinstance(given, int) and isinstance(expected, int)
    # No finite number is near an infinite one.
    if is_exact or given != given or expected in (math.inf, -math.inf):
        return False
    return abs(given - expected) <= TOLERANCE * max(1.0, abs(expected))


def check(candidate):
    for arguments, expected in CASES:
        result = candidate(*arguments)
        is_right = is_same(result, expected)
        if MAY_BE_WRAPPED and isinstance(expected, list) and len(expected) == 1:
            is_right = is_right or is_same(result, expected[0])
        assert is_right, expected
"""
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""Imports that online judges make before a solution."""


class Case(msgspec.Struct, frozen=True):
    """An input and its expected output."""

    stdin: str
    stdout: str


def as_unit_tests(cases: Sequence[Case], tolerance: float | None, *, may_be_wrapped: bool) -> str:
    """Source of unit tests with `check(candidate)`. Raises ValueError for invalid JSON.

    may_be_wrapped: an expected list of one value also stands for that value.
    """
    calls = [f"[[{', '.join(_arguments(case))}], {_checked(case.stdout)}]" for case in cases]
    return _SOURCE.format(
        cases=f"[{', '.join(calls)}]", tolerance=tolerance, may_be_wrapped=may_be_wrapped
    )


def _arguments(case: Case) -> list[str]:
    """The JSON of each argument."""
    return [_checked(line) for line in case.stdin.split("\n") if line.strip()]


def _checked(text: str) -> str:
    """The text, if it is JSON. Raises ValueError.

    No integer is made of its digits: Python refuses more than 4,300, and the sandbox does not.
    """
    try:
        json.loads(text, parse_int=_check_digits)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    return text


def _check_digits(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits, allowed are {MAX_DIGITS:,}")
    return 0


def find_case_problem(tests: Any) -> str:
    """Problem of cases that are calls; empty for none."""
    if tests.comparison == CHECKER:
        return "a checker cannot compare the results of calls: leave out the entry_point"
    for case in tests.cases:
        try:
            _arguments(case)
            _checked(case.stdout)
        except ValueError as error:
            return (
                f"with an entry_point and no unit_tests the cases are calls, with a line of JSON "
                f"for each argument and JSON for the result: {error}: {case.stdin[:80]!r}"
            )
    return ""
