"""Jobs of the two unit-test processes, the tests' report, and details for readers.

Runs in a grading process. A program wrote most of a detail's text, so details are short and quoted
like Python literals, without line ends, control characters or marks that reverse text.
"""

import json

import msgspec

from verification.code.functional import PRELUDE, as_unit_tests
from verification.code.problem import Case, CodeTests, plan_of, source_of
from verification.code.unit_tests import UnusableTests, make_plan
from verification.sandbox.sandbox import ProgramResult
from verification.verdict import GradingError

SHOWN_CHARS = 200
"""Characters shown of each text; the middle of a longer text is left out."""


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


def read_report(lines: bytes) -> Report:
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


def of_case(case: Case, result: ProgramResult) -> str:
    """Detail of a failed case: input, expected and printed output, last error line."""
    output = result.output[: 8 * SHOWN_CHARS].decode(errors="replace")
    shown = f"input {quoted(case.stdin)}, expected {quoted(case.stdout)}, printed {quoted(output)}"
    return shown + _complaint(result.errors)


def of_unit_tests(report: Report, result: ProgramResult) -> str:
    """Detail of failed unit tests: how they ended, last error line."""
    said = f": {quoted(report.message)}" if report.message else ""
    ended = report.ended_by or ("failed inside" if report.has_failed_inside else "not finished")
    return f"unit tests after {report.tests_run}: {ended}{said}" + _complaint(result.errors)


def of_compiler(result: ProgramResult) -> str:
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
