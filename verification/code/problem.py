"""The tests of a code prompt (JSON in its `entry`), and the draw of cases.

Runs where prompts are checked and in grading processes.
"""

import functools
import importlib.util
import random
from pathlib import Path

import msgspec

from verification.code.functional import Case, find_case_problem
from verification.code.languages import LANGUAGES, find_language
from verification.code.output_comparison import CHECKER, OUTPUT_COMPARISONS
from verification.code.unit_tests import Plan, UnusableTests, entry_parts, make_plan
from verification.verdict import GradingError

DEFAULT_CASES = 20
MAX_TIME_S = 60.0
"""Of one test, by the problem's own limit."""
LEAST_MEMORY_BYTES = 1 << 20
PACKAGES: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "sympy": ("sympy", "mpmath"),
    "mpmath": ("mpmath",),
}
"""Packages that a prompt may allow -> their modules."""


class CodeTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tests of a prompt, as in the JSON of its `entry`."""

    language: str = ""
    """Required language; empty: any known language."""
    cases: list[Case] = []
    unit_tests: str | list[str] = ""
    """Python source (or a list of lines) with assertions, `check(candidate)`, pytest functions or
    unittest classes. It must define all names that it uses."""
    entry_point: str = ""
    """Name that unit tests call: `name`, `Class.method` or `Class().method`. Without unit tests
    the cases are calls: a line of JSON for each argument, and JSON for the result."""
    solution_names: list[str] = []
    """Further names of the solution that unit tests use."""
    packages: list[str] = []
    """Packages that solution and unit tests may import."""
    may_be_wrapped: bool = False
    """Of calls: an expected list of one value also stands for that value."""
    comparison: str = "whitespace"
    """"checker" or a key of OUTPUT_COMPARISONS."""
    tolerance: float = 1e-6
    """Tolerance of "float" (absolute or relative) and "distance" (absolute)."""
    time_s: float | None = None
    """CPU time of one test; None: `reward.test_s`."""
    memory_bytes: int | None = None
    """Memory of one test, beside the interpreter; None: `expert.reward.test_memory_bytes`."""
    checker: str = ""
    """Python program that reads {"stdin", "expected", "output"} as JSON from standard input and
    exits with 0 to accept."""


def parse_tests(entry: str) -> CodeTests:
    """The tests of a prompt. Raises GradingError for unusable tests."""
    try:
        tests = msgspec.json.decode(entry, type=CodeTests)
    except msgspec.DecodeError as error:
        raise GradingError(
            f"the entry of a code prompt is not the JSON of its tests: {error}: {entry[:200]!r}"
        ) from error
    problem = _problem(tests)
    if problem:
        raise GradingError(f"the tests of a code prompt are unusable: {problem}")
    return tests


def _problem(tests: CodeTests) -> str:
    """Problem of tests; empty for none."""
    known = (*OUTPUT_COMPARISONS, CHECKER)
    language = find_language(tests.language)
    if tests.language and language is None:
        return f"language = {tests.language!r}, expected one of {', '.join(LANGUAGES)}"
    if not tests.cases and not tests.unit_tests:
        return "neither cases nor unit_tests are given"
    if tests.comparison not in known:
        return f"comparison = {tests.comparison!r}, expected one of {', '.join(known)}"
    if (tests.comparison == CHECKER) != bool(tests.checker):
        return "a checker and comparison = 'checker' belong together, and one is missing"
    if tests.unit_tests and not tests.entry_point:
        return "unit_tests are given without the entry_point that they call"
    if tests.unit_tests and language not in (None, "python"):
        return f"unit_tests are Python, but language = {tests.language!r}"
    if not tests.tolerance >= 0:
        return f"tolerance = {tests.tolerance}, expected a number >= 0"
    if tests.time_s is not None and not 0 < tests.time_s <= MAX_TIME_S:
        return f"time_s = {tests.time_s}, expected seconds above 0, at most {MAX_TIME_S:g}"
    if tests.memory_bytes is not None and tests.memory_bytes < LEAST_MEMORY_BYTES:
        return f"memory_bytes = {tests.memory_bytes}, expected at least {LEAST_MEMORY_BYTES}"
    unknown = sorted(set(tests.packages) - set(PACKAGES))
    if unknown:
        return f"packages = {unknown}, expected some of {', '.join(PACKAGES)}"
    if not is_called(tests):
        return ""
    try:
        if tests.unit_tests:
            plan_of(tests)
            return ""
        entry_parts(tests.entry_point)
    except UnusableTests as error:
        return f"unit_tests: {error}" if tests.unit_tests else str(error)
    return find_case_problem(tests)


def is_called(tests: CodeTests) -> bool:
    """Whether tests call functions of the solution instead of running it as a program."""
    return bool(tests.unit_tests or tests.entry_point)


def source_of(tests: CodeTests) -> str:
    """The unit tests as one text."""
    if isinstance(tests.unit_tests, str):
        return tests.unit_tests
    return "\n".join(tests.unit_tests)


def plan_of(tests: CodeTests) -> Plan:
    """Plan of the unit tests. Raises UnusableTests."""
    return make_plan(
        source_of(tests),
        tests.entry_point,
        names=tuple(tests.solution_names),
        packages=tuple(name for package in tests.packages for name in PACKAGES[package]),
    )


def draw_cases(
    tests: CodeTests, *, seed: int, count: int = DEFAULT_CASES, most: int | None = None
) -> list[Case]:
    """At most `count` cases in their order; one seed draws the same cases.

    most: limits the number further, to some of the same cases. Source: Magistral (arXiv
    2506.10910), section 2.2.2: 20 tests, the same for a whole group.
    """
    indices = list(range(len(tests.cases)))
    for size in (count, count if most is None else most):
        if len(indices) > size:
            indices = sorted(random.Random(seed).sample(indices, size))
    return [tests.cases[index] for index in indices]


@functools.cache
def package_folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Folders of the packages' modules and of the libraries that wheels install next to them.

    Raises GradingError for a package that is not installed.
    """
    found: list[str] = []
    for package in packages:
        for module in PACKAGES[package]:
            folder = _folder(module)
            libraries = folder.with_name(f"{folder.name}.libs")
            found += [str(path) for path in (folder, libraries) if path.is_dir()]
    return tuple(dict.fromkeys(found))


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise GradingError(f"a code prompt allows {module}, which is not installed: pip install it")
    return Path(spec.submodule_search_locations[0])
