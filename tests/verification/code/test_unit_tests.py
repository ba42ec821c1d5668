"""Unit tests of many shapes, and results that attack them: right ones pass, wrong ones fail."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.types import Prompt
from tests.verification.code.number_cases import NUMBERS, NUMBERS_OF_PACKAGES
from tests.verification.code.unit_test_cases import (
    ADD,
    ATTACKS,
    SHAPES,
    SUB,
    VALUES,
    WITH_PACKAGES,
    Row,
)
from verification.code.grading import (
    Case,
    CodeLimits,
    CodeTests,
    grade,
    make_jobs,
    prepare,
    run_unit_tests,
)
from verification.code.problem import PACKAGES, parse_tests
from verification.code.setup import open_sandbox
from verification.sandbox import confinement
from verification.sandbox.sandbox import Sandbox
from verification.settings import check_prompts
from verification.verdict import GradingError

ROWS = [*SHAPES, *VALUES, *ATTACKS, *NUMBERS]


@pytest.fixture(scope="module")
def limits() -> CodeLimits:
    return prepare(CodeLimits(test_s=2.0))


def test_there_are_enough_cases() -> None:
    assert len(ROWS) >= 60
    assert sum(len(row.right) + len(row.wrong) for row in ROWS) >= 150


@pytest.fixture(scope="module")
def sandbox(limits: CodeLimits) -> Iterator[Sandbox]:
    # One for all, since to start one takes longer than to run the tests.
    with open_sandbox("python", limits) as opened:
        yield opened


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_right_solutions_pass_and_wrong_ones_fail(
    row: Row, limits: CodeLimits, sandbox: Sandbox
) -> None:
    entry = {"unit_tests": row.unit_tests, "entry_point": row.entry_point}
    tests = parse_tests(json.dumps(entry))
    for source in row.right:
        verdict = run_unit_tests(sandbox, make_jobs(source, tests, []), limits)
        assert verdict.reason == "correct", source
    for source in row.wrong:
        verdict = run_unit_tests(sandbox, make_jobs(source, tests, []), limits)
        assert not verdict.is_correct, source
        assert verdict.reason in (
            "wrong_output", "runtime_error", "test_timeout", "test_memory", "no_entry_point",
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_installation_leaves_bytecode_of_packages(name: str) -> None:
    # A sandbox cannot write it, and SymPy's import without it takes most of a test's time.
    source = Path(str(importlib.import_module(name).__file__))
    assert Path(importlib.util.cache_from_source(str(source))).is_file()


@pytest.mark.parametrize("row", [*WITH_PACKAGES, *NUMBERS_OF_PACKAGES], ids=lambda row: row.name)
def test_packages_that_the_task_allows(row: Row, limits: CodeLimits) -> None:
    entry = {"unit_tests": row.unit_tests, "entry_point": "f", "packages": ["numpy", "sympy"]}
    tests = parse_tests(json.dumps(entry))
    for source in row.right:
        assert grade(source, "python", tests, seed=0, limits=limits).reason == "correct", source
    for source in row.wrong:
        assert not grade(source, "python", tests, seed=0, limits=limits).is_correct, source


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
def test_only_packages_that_the_task_allows_can_be_imported(isolation: str) -> None:
    if isolation == "landlock" and not confinement.landlock_version():
        pytest.skip("this kernel has no Landlock")
    source = "import importlib\nfor name in ('numpy', 'mpmath', 'msgspec', 'pip'):\n"
    source += "    try: print(importlib.import_module(name).__name__)\n"
    source += "    except ImportError: print('-')"
    limits = CodeLimits(isolation=isolation)
    for packages, output in (([], "- - - -"), (["mpmath"], "- mpmath - -")):
        tests = CodeTests(cases=[Case("", output)], packages=packages)
        assert grade(source, "python", tests, seed=0, limits=limits).reason == "correct"


def test_unknown_package_is_refused() -> None:
    entry = {"unit_tests": "assert f(1)", "entry_point": "f", "packages": ["torch"]}
    with pytest.raises(GradingError, match="expected some of numpy, sympy, mpmath"):
        parse_tests(json.dumps(entry))


@pytest.mark.parametrize(
    ("unit_tests", "complaint"),
    [
        ("assert (", "no Python"),
        ("x = 1\0", "no Python"),
        ("assert g(1)", "nobody defines"),
        ("def test_a():\n    assert f(1) == nothing", "'nothing', which nobody defines"),
        ("assert True", "can ever call"),
        ("def check(candidate): pass", "can ever call"),
        ("def check(candidate):\n    assert candidate", "can ever call"),
        ("assert callable(f)", "can ever call"),
        ("print(f(1) == 2)", "nothing in the tests checks"),
        ("def test_a():\n    f(1)", "nothing in the tests checks"),
        ("assert True, 'starts'\nf(1)", "nothing in the tests checks"),
        ("def helper(a, b):\n    assert f(a) == b", "nothing gives its arguments"),
        ("def test_a(caplog):\n    f(1)", "nothing gives its arguments caplog"),
        ("class TestF:\n    def test_a(self, caplog):\n        assert f(1)", "arguments caplog"),
        (
            "import pytest\n@pytest.fixture\ndef g(tmp_path):\n    return f(1)\n"
            "def test_a(g):\n    assert g == 2",
            "arguments tmp_path",
        ),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass",
            "can ever call",
        ),
        ("class Checks:\n    def test_a(self):\n        assert f(1) == 2", "can ever call"),
        ("import nothing_like_this\nassert f(1)", "sandbox does not have"),
        ("import numpy\nassert f(1)", "sandbox does not have"),
        ("import pickle\nassert pickle.loads(f(1)) == 1", "import pickle"),
        ("import importlib\nassert importlib.import_module(f(1))", "import importlib"),
        ("from builtins import eval as e\nassert e(f(1))", "import builtins"),
        ("assert exec(f(1))", "uses exec"),
        ("run = exec\nrun(f(1))", "uses exec"),
        ("assert __import__(f(1))", "uses __import__"),
        ("assert __builtins__['eval'](f(1))", "uses __builtins__"),
        ("c = compile(f(1), 'x', 'eval')", "uses compile"),
        ("import sys, io\nsys.stdin = io.StringIO('1')\nassert f(1)", "replaces sys.stdin"),
        ("from unittest.mock import patch\nwith patch('builtins.input'):\n    f(1)", "patch"),
        ("from unittest import mock\nwith mock.patch.object(f, 'x'):\n    f(1)", "patch"),
        ("import pytest\n@pytest.mark.weird\ndef test_a():\n    f(1)", "pytest.mark.weird"),
        (
            "import pytest\npytestmark = [pytest.mark.skip]\ndef test_a():\n    assert f(1)",
            "line 2 sets pytestmark",
        ),
        (
            "import pytest\n@pytest.fixture(name='x')\ndef g():\n    return 1\n"
            "def test_a(x):\n    assert f(x)",
            "line 2 gives a fixture another name",
        ),
        (
            "import pytest\n@pytest.fixture\ndef x(request):\n    return request.param\n"
            "@pytest.mark.parametrize('x', [1], indirect=['x'])\ndef test_a(x):\n    assert f(x)",
            "line 5 uses parametrize with indirect",
        ),
        ("import pytest\npytest.importorskip('x')\nf(1)", "pytest.importorskip"),
        ("from math import *\nassert sqroot(f(1))", "'sqroot', which nobody defines"),
    ],
)
def test_tests_that_can_grade_nothing_are_refused_when_loaded(
    unit_tests: str, complaint: str, limits: CodeLimits
) -> None:
    with pytest.raises(GradingError, match="tests of a code prompt are unusable") as error:
        parse_tests(json.dumps({"unit_tests": unit_tests, "entry_point": "f"}))
    assert complaint in str(error.value)
    with pytest.raises(GradingError, match="unit tests of a code prompt are broken"):
        tests = CodeTests(unit_tests=unit_tests, entry_point="f")
        grade(ADD, "python", tests, seed=0, limits=limits)


def test_a_prompt_with_such_tests_ends_a_run_before_it_starts() -> None:
    entry = json.dumps({"unit_tests": "assert g(1) == 2", "entry_point": "f"})
    prompt = Prompt("p", "code", [], "", entry=entry)
    with pytest.raises(InputError, match="prompt 'p'.*'g', which nobody defines"):
        check_prompts([prompt], RewardConfig())


@pytest.mark.parametrize(
    "unit_tests",
    [
        "assert [][0] or f(1)",
        "assert 1 == 2\nassert f(1)",
        "if 1 == 2:\n    assert f(1)",
        "import os\nos._exit(0)\nassert f(1)",
        "def suite():\n    return f if False else 0\nsuite()",
    ],
)
def test_tests_that_fail_before_they_call_are_our_fault(
    unit_tests: str, limits: CodeLimits
) -> None:
    tests = CodeTests(unit_tests=unit_tests, entry_point="f")
    for source in (ADD, SUB):
        with pytest.raises(GradingError, match="unit tests of a code prompt are broken"):
            grade(source, "python", tests, seed=0, limits=limits)


@pytest.mark.parametrize("entry_point", ["", "f()", "a.b.c", "1f", "f.", ".f", "a b"])
def test_entry_point_that_is_no_name_is_refused(entry_point: str) -> None:
    with pytest.raises(GradingError, match="entry_point"):
        parse_tests(json.dumps({"unit_tests": "assert f(1)", "entry_point": entry_point}))


def _functional(**more: object) -> CodeTests:
    cases = [Case("[1, 2]\n3", "[4, 5]"), Case("[]\n1", "[]")]
    entry = {"cases": cases, "entry_point": "add", **more}
    return parse_tests(json.dumps(entry, default=lambda c: {"stdin": c.stdin, "stdout": c.stdout}))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "class Solution:\n def add(self, xs: List[int], n): return [x + n for x in xs]",
            "correct",
        ),
        ("def add(xs, n): return tuple(x + n for x in xs)", "correct"),
        ("def add(xs, n): return [x - n for x in xs]", "wrong_output"),
        ("def add(xs, n): raise StopIteration", "runtime_error"),
        ("def add(xs, n): print([4, 5])", "wrong_output"),
        ("class Solution:\n def sub(self, xs, n): return xs", "no_entry_point"),
    ],
)
def test_cases_that_are_calls(source: str, reason: str, limits: CodeLimits) -> None:
    assert grade(source, "python", _functional(), seed=0, limits=limits).reason == reason


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("{1: [2], 'x': None}", "correct"),
        ("{'x': None, '1': (2,)}", "correct"),
        ("{1: [2], '1': [2]}", "wrong_output"),
        ("{1: [2]}", "wrong_output"),
        ("{1: [2], 'x': 0}", "wrong_output"),
    ],
)
def test_calls_that_return_dictionaries(result: str, reason: str, limits: CodeLimits) -> None:
    cases = [{"stdin": "1", "stdout": '{"1": [2], "x": null}'}]
    tests = parse_tests(json.dumps({"cases": cases, "entry_point": "f"}))
    source = f"def f(n): return {result}"
    assert grade(source, "python", tests, seed=0, limits=limits).reason == reason


def test_cases_that_are_calls_need_json() -> None:
    cases = [{"stdin": "1 2", "stdout": "3"}]
    with pytest.raises(GradingError, match="a line of JSON for each argument"):
        parse_tests(json.dumps({"cases": cases, "entry_point": "add"}))
