"""Runs a program's tests and grades it.

Runs in a grading process, which must be alone with the program's sandbox: see `grade`.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from verification.code.functional import PRELUDE, as_unit_tests
from verification.code.languages import LANGUAGES, compile_command, find_language, header_folder
from verification.code.output_comparison import CHECKER, OUTPUT_COMPARISONS
from verification.code.problem import (
    Case,
    CodeTests,
    draw_cases,
    is_called,
    plan_of,
    source_of,
)
from verification.code.setup import (
    CodeLimits,
    limits_of_compiler,
    limits_of_test,
    open_sandbox,
    prepare,
    with_own_limits,
)
from verification.code.unit_tests import UnusableTests, make_plan
from verification.run_time import available_bytes
from verification.sandbox.call_proxy import EXIT_NO_ENTRY_POINT
from verification.sandbox.sandbox import Ending, ProgramResult, Sandbox
from verification.sandbox.server import EXIT_OUT_OF_MEMORY, EXIT_SYNTAX
from verification.sandbox.time_limits import Limits
from verification.verdict import CORRECT, GradingError, HostBusy, Verdict

SHOWN_CHARS = 200
"""Characters shown of each text; the middle of a longer text is left out."""
MEMORY_SHARE = 0.8
"""A failed program that held this share of its memory limit ran out of memory."""
WRONG_OUTPUT = Verdict(False, "wrong_output")
_MEMORY_WORDS = ("std::bad_alloc", "MemoryError", "std::bad_array_new_length")


class Report(msgspec.Struct, frozen=True):
    """The tests' process's report of tests and calls."""

    is_asked: bool = False
    """The tests asked the solution something, so the solution may have caused later failures."""
    is_complete: bool = False
    """The tests' process reported the other fields."""
    tests_run: int = 0
    """Completed tests."""
    calls: int = 0
    """Answered calls of the solution."""
    is_gone: bool = False
    """The solution's process ended or broke the protocol."""
    has_failed_inside: bool = False
    """An assertion failed in a function that the tests passed to the solution."""
    ended_by: str = ""
    """"assertion", "gone", "error"; empty when all tests ran."""
    message: str = ""

    @property
    def is_passed(self) -> bool:
        """Whether all tests ran to their end and called the solution."""
        is_whole = self.is_complete and not self.ended_by
        is_whole &= not self.is_gone and not self.has_failed_inside
        return is_whole and self.tests_run > 0 and self.calls > 0


def grade(
    source: str,
    tag: str,
    tests: CodeTests,
    *,
    seed: int,
    limits: CodeLimits,
    counts_all: bool = False,
) -> Verdict:
    """Verdict on a program: correct, or the reason of the first failed test.

    counts_all: run all tests and also count those that pass; the reason stays the same. Unit tests
    count as one test beside the cases; calls count one by one.

    Takes at most `longest_item_s` (of one more test with counts_all and calls). The calling process
    needs no CPU limit, RLIMIT_FSIZE of at least a test's input, and 64 open files. It may be killed
    at any time, which kills all that it started. Raises GradingError for our own failures.
    """
    name = find_language(tag)
    if name is None or not _is_allowed(name, tests):
        return Verdict(False, "unknown_language" if name is None else "wrong_language")
    # UTF-8 has no lone surrogates: the compiler refuses their bytes.
    code = source.encode("utf-8", "surrogatepass")
    own = with_own_limits(limits, tests)
    cases = draw_cases(tests, seed=seed, count=limits.cases, most=own.cases)
    jobs = make_jobs(source, tests, cases) if is_called(tests) else None
    with open_sandbox(name, limits, tests.packages) as sandbox:
        verdict = compile_program(sandbox, name, code, limits)
        # Without unit tests, cases of an entry point are calls; one job runs all of them.
        calls = cases if tests.entry_point and not tests.unit_tests else []
        total = len(cases) + (jobs is not None and not calls)
        if not verdict.is_correct:
            return verdict._replace(tests=(0, total)) if counts_all else verdict

        def run_tests() -> Iterator[Verdict]:
            for number, case in enumerate(cases if not calls else [], 1):
                found = _run_case(sandbox, name, code, case=case, tests=tests, limits=own)
                yield found._replace(detail=found.detail and f"test {number}: {found.detail}")
            if jobs is not None:
                yield run_unit_tests(sandbox, jobs, own)

        verdict, passed = _first_failure(run_tests(), counts_all=counts_all)
        if not counts_all:
            return verdict
        if calls and verdict.is_correct:
            passed = total
        elif len(calls) > 1:
            passed = _count_calls(sandbox, source, tests, calls=calls, limits=own)
    return verdict._replace(tests=(passed, total))


class Ran(NamedTuple):
    """What came of a program."""

    reason: str
    """"" for exit code 0; else as in a verdict, such as "runtime_error" or "test_timeout"."""
    output: str
    errors: str
    """Start of standard error, or the compiler's messages."""


def run_program(source: str, tag: str, *, stdin: str, limits: CodeLimits) -> Ran:
    """Run a program once. The caller must be as for `grade`. Raises GradingError."""
    name = find_language(tag)
    if name is None:
        return Ran("unknown_language", "", f"{tag!r}: known are {', '.join(LANGUAGES)}")
    code = source.encode("utf-8", "surrogatepass")
    with open_sandbox(name, limits) as sandbox:
        compiled = compile_program(sandbox, name, code, limits)
        if not compiled.is_correct:
            return Ran(compiled.reason, "", compiled.detail)
        result, failure = run_on_input(sandbox, name, code, stdin=stdin, limits=limits)
    reason = failure.reason if failure else ""
    return Ran(reason, result.output.decode(errors="replace"), result.errors)


def _is_allowed(name: str, tests: CodeTests) -> bool:
    required = "python" if is_called(tests) else find_language(tests.language)
    return required in (None, name)


def _first_failure(verdicts: Iterator[Verdict], *, counts_all: bool) -> tuple[Verdict, int]:
    """(verdict, passed tests); without counts_all no test runs after a failure."""
    found, passed = CORRECT, 0
    for verdict in verdicts:
        passed += verdict.is_correct
        if found.is_correct:
            found = verdict
        if not found.is_correct and not counts_all:
            break
    return found, passed


def _count_calls(
    sandbox: Sandbox, source: str, tests: CodeTests, *, calls: list[Case], limits: CodeLimits
) -> int:
    """Number of calls that pass one by one, after they failed together."""
    jobs = (make_jobs(source, tests, [call]) for call in calls)
    passed = sum(run_unit_tests(sandbox, job, limits).is_correct for job in jobs)
    # Together they took too long, or an earlier call changed a later one.
    return min(passed, len(calls) - 1)


def compile_program(sandbox: Sandbox, name: str, code: bytes, limits: CodeLimits) -> Verdict:
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
    return Verdict(False, "compile_error", detail=_of_compiler(result))


def _run_case(
    sandbox: Sandbox, name: str, code: bytes, *, case: Case, tests: CodeTests, limits: CodeLimits
) -> Verdict:
    """Verdict on one case; the expected output never leaves this process."""
    result, verdict = run_on_input(sandbox, name, code, stdin=case.stdin, limits=limits)
    if verdict is None and tests.comparison == CHECKER:
        verdict = _run_checker(sandbox, tests.checker, case, output=result.output, limits=limits)
    elif verdict is None:
        is_same = OUTPUT_COMPARISONS[tests.comparison]
        expected = case.stdout.encode("utf-8", "surrogatepass")
        is_right = is_same(result.output, expected, tests.tolerance)
        verdict = CORRECT if is_right else WRONG_OUTPUT
    return verdict if verdict.is_correct else verdict._replace(detail=_of_case(case, result))


def run_on_input(
    sandbox: Sandbox, name: str, code: bytes, *, stdin: str, limits: CodeLimits
) -> tuple[ProgramResult, Verdict | None]:
    """Result of a compiled program; the verdict if it failed whatever its output."""
    program = LANGUAGES[name].program
    allowed = limits_of_test(limits)
    command = [f"{sandbox.build_folder}/{program}"] if program else None
    given = stdin.encode("utf-8", "surrogatepass")
    result = sandbox.run(command, b"" if command else code, stdin=given, limits=allowed)
    return result, failure_of(result, result.endings[0], allowed, is_python=not program)


def failure_of(
    result: ProgramResult, ending: Ending, allowed: Limits, *, is_python: bool
) -> Verdict | None:
    """Verdict on a program that failed whatever its output; None if it ended well."""
    # A program may end between two checks: the CPU time at its end decides the same on every host.
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
    """Verdict of the tests' own checker; the program has ended before."""
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


# --- unit tests -----------------------------------------------------------------------------------


def run_unit_tests(sandbox: Sandbox, jobs: tuple[bytes, bytes], limits: CodeLimits) -> Verdict:
    """Verdict of unit tests, which run in another process than the solution: see `call_proxy.py`.

    The report decides, never the exit code of the tests' process.
    """
    allowed = limits_of_test(limits)
    result = sandbox.check(*jobs, limits=allowed)
    report = _read_report(result.output)
    verdict = _judge_report(report, result, allowed)
    if verdict.is_correct:
        return verdict
    if verdict.reason == "no_entry_point":
        name = json.loads(jobs[0])["entry_point"]
        return verdict._replace(detail=f"the program defines no {quoted(name)}")
    return verdict._replace(detail=_of_unit_tests(report, result))


def _judge_report(report: Report, result: ProgramResult, allowed: Limits) -> Verdict:
    _, solution = result.endings
    if report.is_passed:
        return CORRECT
    if not report.is_asked:
        # The solution had no part in this failure.
        silence = "they called nothing" if report.is_complete else "they ended without a word"
        why = report.message or result.errors or silence
        raise GradingError(f"the unit tests of a code prompt are broken: {why}")
    if solution.exit_code == EXIT_NO_ENTRY_POINT:
        return Verdict(False, "no_entry_point")
    if result.is_late:
        return Verdict(False, "test_timeout")
    if not report.is_complete:
        return failure_of(result, result.endings[0], allowed, is_python=True) or Verdict(
            False, "runtime_error"
        )
    if report.is_gone:
        blank = msgspec.structs.replace(result, output=b"", errors="")
        failure = failure_of(blank, solution, allowed, is_python=True)
        return failure or Verdict(False, "runtime_error")
    if report.ended_by == "assertion" or report.has_failed_inside:
        return WRONG_OUTPUT
    if not report.ended_by:
        raise GradingError(
            "the unit tests of a code prompt are broken: they call nothing in the solution"
        )
    return Verdict(False, "runtime_error")


def _read_report(lines: bytes) -> Report:
    """The last report."""
    whole = [line for line in lines.split(b"\n") if line]
    return msgspec.json.decode(whole[-1], type=Report) if whole else Report()


def make_jobs(source: str, tests: CodeTests, cases: list[Case]) -> tuple[bytes, bytes]:
    """Jobs of the solution's process and the tests' process. Raises GradingError."""
    try:
        if tests.unit_tests:
            unit_tests, plan, imports = source_of(tests), plan_of(tests), ""
        else:
            tolerance = tests.tolerance if tests.comparison == "float" else None
            unit_tests = as_unit_tests(cases, tolerance, may_be_wrapped=tests.may_be_wrapped)
            imports = PRELUDE
            plan = make_plan(unit_tests, tests.entry_point)
    except (UnusableTests, ValueError) as error:
        raise GradingError(f"the unit tests of a code prompt are broken: {error}") from error
    if "Solution" in tests.entry_point:
        imports = PRELUDE
    common = {"entry_point": tests.entry_point}
    solution = {"source": source, "prelude": imports + plan.prelude}
    solution["captures_output"] = plan.captures_output
    return (
        # Not msgspec, which refuses the lone surrogates that a completion may hold.
        json.dumps(common | solution).encode(),
        json.dumps(common | msgspec.to_builtins(plan) | {"source": unit_tests}).encode(),
    )


# --- details for readers --------------------------------------------------------------------------
# A program wrote most of a detail's text, so details are short and quoted like Python literals,
# without line ends, control characters or marks that reverse text.


def _of_case(case: Case, result: ProgramResult) -> str:
    """Detail of a failed case: input, expected and printed output, last error line."""
    output = result.output[: 8 * SHOWN_CHARS].decode(errors="replace")
    shown = f"input {quoted(case.stdin)}, expected {quoted(case.stdout)}, printed {quoted(output)}"
    return shown + _complaint(result.errors)


def _of_unit_tests(report: Report, result: ProgramResult) -> str:
    """Detail of failed unit tests: how they ended, last error line."""
    said = f": {quoted(report.message)}" if report.message else ""
    ended = report.ended_by or ("failed inside" if report.has_failed_inside else "not finished")
    return f"unit tests after {report.tests_run}: {ended}{said}" + _complaint(result.errors)


def _of_compiler(result: ProgramResult) -> str:
    """Detail of a failed compilation: the compiler's first messages."""
    text = result.output[: 8 * SHOWN_CHARS].decode(errors="replace") or result.errors
    return f"compiler: {quoted(text)}"


def _complaint(errors: str) -> str:
    # The last line of a traceback names the exception.
    last = errors.strip().rsplit("\n", 1)[-1]
    return f", error {quoted(last)}" if last else ""


def quoted(text: str) -> str:
    """The text on one line, without the middle of a long text."""
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        return f"{text[:half]!r}...{text[-half:]!r}"
    return repr(text)
