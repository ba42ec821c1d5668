"""Grades a program by its tests: the tests of a prompt, the draw of cases, the verdict.

Runs in a grading process, which must be alone with the program's sandbox: see `grade`.
"""

import json
import random

import msgspec

from verification.code.languages import LANGUAGES, compile_command, find_language
from verification.code.output_comparison import CHECKER, OUTPUT_COMPARISONS
from verification.code.setup import (
    CodeLimits,
    header_folder,
    limits_of_compiler,
    limits_of_test,
    open_sandbox,
    prepare,
)
from verification.run_time import available_bytes
from verification.sandbox.call_proxy import (
    EXIT_ASSERTION,
    EXIT_NO_ENTRY_POINT,
    EXIT_PASSED,
    EXIT_SOLUTION_GONE,
    EXIT_TESTS_BROKEN,
)
from verification.sandbox.sandbox import Ending, ProgramResult, Sandbox
from verification.sandbox.server import EXIT_OUT_OF_MEMORY, EXIT_SYNTAX
from verification.sandbox.time_limits import Limits
from verification.verdict import CORRECT, GradingError, HostBusy, Verdict

__all__ = ["Case", "CodeLimits", "CodeTests", "draw_cases", "grade", "parse_tests", "prepare"]

DEFAULT_CASES = 20
MEMORY_SHARE = 0.8
"""A program that failed while holding so much of its memory failed for want of memory."""
WRONG_OUTPUT = Verdict(False, "wrong_output")
_MEMORY_WORDS = ("std::bad_alloc", "MemoryError", "std::bad_array_new_length")


class Case(msgspec.Struct, frozen=True):
    """An input and the output expected for it."""

    stdin: str
    stdout: str


class CodeTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tests of a prompt, as its `entry` holds them in JSON."""

    language: str = ""
    """Required language; empty: any known one."""
    cases: list[Case] = []
    unit_tests: str = ""
    """Python source that asserts, or defines `check(candidate)`. It must define what it uses."""
    entry_point: str = ""
    """Function of the solution that the unit tests call."""
    comparison: str = "whitespace"
    """"exact", "whitespace", "float" or "checker"."""
    tolerance: float = 1e-6
    """Absolute or relative, for "float"."""
    checker: str = ""
    """Python source: reads {"stdin", "expected", "output"} as JSON on its standard input and exits
    with 0 to accept."""


def parse_tests(entry: str) -> CodeTests:
    """The tests of a prompt; GradingError says what is wrong with them."""
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
    """What is wrong with tests; empty if nothing."""
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
    return ""


def draw_cases(tests: CodeTests, *, seed: int, count: int = DEFAULT_CASES) -> list[Case]:
    """At most `count` cases in their order, the same for the same seed.

    Source: Magistral (arXiv 2506.10910), section 2.2.2: 20 tests, the same for a whole group.
    """
    indices = range(len(tests.cases))
    if len(indices) > count:
        indices = sorted(random.Random(seed).sample(indices, count))
    return [tests.cases[index] for index in indices]


def grade(source: str, tag: str, tests: CodeTests, *, seed: int, limits: CodeLimits) -> Verdict:
    """Whether a program passes all its tests; stops at the first that fails.

    Takes at most `longest_item_s`. The calling process needs no limit on its processor time, no
    RLIMIT_FSIZE below the size of a test's input, and at least 64 open files; it may be killed at
    any time, with all that it started here. GradingError: our own failure, never a verdict.
    """
    name = find_language(tag)
    if name is None:
        return Verdict(False, "unknown_language")
    required = "python" if tests.unit_tests else find_language(tests.language)
    if required not in (None, name):
        return Verdict(False, "wrong_language")
    # Lone surrogates have no place in UTF-8: the compiler refuses what stands for them.
    code = source.encode("utf-8", "surrogatepass")
    with open_sandbox(name, limits) as sandbox:
        verdict = _compile(sandbox, name, code, limits)
        for case in draw_cases(tests, seed=seed, count=limits.cases):
            if not verdict.is_correct:
                return verdict
            verdict = _run_case(sandbox, name, code, case=case, tests=tests, limits=limits)
        if tests.unit_tests and verdict.is_correct:
            verdict = _run_unit_tests(sandbox, code, tests, limits)
    return verdict


def _compile(sandbox: Sandbox, name: str, code: bytes, limits: CodeLimits) -> Verdict:
    language = LANGUAGES[name]
    if not language.compiler:
        return CORRECT
    headers = header_folder(name, prepare(limits).cache_folder)
    allowed = limits_of_compiler(limits)
    command = compile_command(language, headers)
    result = sandbox.compile(command, code, source_name=language.source_name, limits=allowed)
    ending = result.endings[0]
    if ending.exit_code == 0:
        return CORRECT
    if result.is_late or ending.cpu_s >= allowed.cpu_s:
        return Verdict(False, "compile_timeout")
    return Verdict(False, "compile_error")


def _run_case(
    sandbox: Sandbox, name: str, code: bytes, *, case: Case, tests: CodeTests, limits: CodeLimits
) -> Verdict:
    """Verdict on one case; the expected output stays in this process while the program runs."""
    allowed = limits_of_test(limits)
    program = LANGUAGES[name].program
    command = [f"{sandbox.build_folder}/{program}"] if program else None
    stdin = case.stdin.encode("utf-8", "surrogatepass")
    result = sandbox.run(command, b"" if command else code, stdin=stdin, limits=allowed)
    verdict = _failure(result, result.endings[0], allowed, is_python=not program)
    if verdict is not None:
        return verdict
    if tests.comparison == CHECKER:
        return _run_checker(sandbox, tests.checker, case, output=result.output, limits=limits)
    is_same = OUTPUT_COMPARISONS[tests.comparison]
    expected = case.stdout.encode("utf-8", "surrogatepass")
    return CORRECT if is_same(result.output, expected, tests.tolerance) else WRONG_OUTPUT


def _failure(
    result: ProgramResult, ending: Ending, allowed: Limits, *, is_python: bool
) -> Verdict | None:
    """Why a program failed whatever its output; None if it ended well."""
    # A program may end between two looks at it: the clock of its end decides alike on every host.
    if result.is_late or ending.cpu_s >= allowed.cpu_s:
        return Verdict(False, "test_timeout")
    if len(result.output) >= allowed.file_bytes:
        return Verdict(False, "output_limit")
    if ending.exit_code == 0:
        return None
    if is_python and ending.exit_code == EXIT_SYNTAX:
        return Verdict(False, "compile_error")
    if ending.peak_bytes >= MEMORY_SHARE * allowed.memory_bytes:
        return Verdict(False, "test_memory")
    is_starved = any(word in result.errors for word in _MEMORY_WORDS)
    if is_starved or ending.exit_code == EXIT_OUT_OF_MEMORY:
        if available_bytes() < allowed.memory_bytes:
            raise HostBusy("the host had less memory left than one test may use")
        return Verdict(False, "test_memory")
    return Verdict(False, "runtime_error")


def _run_checker(
    sandbox: Sandbox, checker: str, case: Case, *, output: bytes, limits: CodeLimits
) -> Verdict:
    """Verdict of the checker that comes with the tests; the program no longer runs."""
    question = {
        "stdin": case.stdin,
        "expected": case.stdout,
        "output": output.decode(errors="replace"),
    }
    allowed = limits_of_test(limits)
    stdin = json.dumps(question).encode()
    result = sandbox.run(None, checker.encode(), stdin=stdin, limits=allowed)
    ending = result.endings[0]
    if ending.exit_code == EXIT_SYNTAX:
        raise GradingError(f"the checker of a code prompt is no Python: {checker[:200]!r}")
    if result.is_late or ending.exit_code < 0 or ending.exit_code == EXIT_OUT_OF_MEMORY:
        return Verdict(False, "checker_limit")
    return CORRECT if ending.exit_code == 0 else WRONG_OUTPUT


def _run_unit_tests(sandbox: Sandbox, code: bytes, tests: CodeTests, limits: CodeLimits) -> Verdict:
    """Verdict of unit tests, which run apart from the solution: see `call_proxy.py`."""
    allowed = limits_of_test(limits)
    source = tests.unit_tests.encode("utf-8", "surrogatepass")
    result = sandbox.check(code, source, entry_point=tests.entry_point, limits=allowed)
    tester, solution = result.endings
    if tester.exit_code == EXIT_PASSED:
        return CORRECT
    if tester.exit_code == EXIT_TESTS_BROKEN:
        raise GradingError(f"the unit tests of a code prompt are broken: {result.errors}")
    if result.is_late:
        return Verdict(False, "test_timeout")
    if tester.exit_code == EXIT_ASSERTION:
        return WRONG_OUTPUT
    if solution.exit_code == EXIT_NO_ENTRY_POINT:
        return Verdict(False, "no_entry_point")
    if tester.exit_code == EXIT_SOLUTION_GONE and solution.exit_code:
        blank = msgspec.structs.replace(result, errors="")
        failure = _failure(blank, solution, allowed, is_python=True)
        return failure or Verdict(False, "runtime_error")
    return Verdict(False, "runtime_error")
