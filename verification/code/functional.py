"""Cases that are calls: arguments as lines of JSON, the result as JSON (LiveCodeBench's form).

Runs where prompts are checked and in grading processes. Cases become unit tests, so that expected
results stay out of the solution's process.
"""

import json
from typing import Any, Protocol

from verification.code.output_comparison import CHECKER

_SOURCE = """
import json

CASES = json.loads({cases!r})
TOLERANCE = {tolerance!r}


def is_same(given, expected):
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
    if TOLERANCE is None:
        return given == expected
    return abs(given - expected) <= TOLERANCE * max(1.0, abs(expected))


def check(candidate):
    for arguments, expected in CASES:
        assert is_same(candidate(*arguments), expected), expected
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


class _Case(Protocol):
    stdin: str
    stdout: str


def as_unit_tests(cases: list[Any], tolerance: float | None) -> str:
    """Source of unit tests with `check(candidate)`. Raises ValueError for invalid JSON."""
    calls = [[_arguments(case), json.loads(case.stdout)] for case in cases]
    return _SOURCE.format(cases=json.dumps(calls), tolerance=tolerance)


def _arguments(case: _Case) -> list[Any]:
    return [json.loads(line) for line in case.stdin.split("\n") if line.strip()]


def find_case_problem(tests: Any) -> str:
    """Problem of cases that are calls; empty for none."""
    if tests.comparison == CHECKER:
        return "a checker cannot compare the results of calls: leave out the entry_point"
    for case in tests.cases:
        try:
            _arguments(case)
            json.loads(case.stdout)
        except ValueError as error:
            return (
                f"with an entry_point and no unit_tests the cases are calls, with a line of JSON "
                f"for each argument and JSON for the result: {error}: {case.stdin[:80]!r}"
            )
    return ""
