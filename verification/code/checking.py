"""What the two processes of unit tests are given, what the tests report, and what a reader is told.

Runs in a grading process. A program wrote most of what a reader is told: it is short and quoted as
Python would, without line ends, control characters and marks that turn text around.
"""

import json

import msgspec

from verification.code.functional import PRELUDE, as_unit_tests
from verification.code.problem import Case, CodeTests, plan_of, source_of
from verification.code.unit_tests import UnusableTests, make_plan
from verification.sandbox.sandbox import ProgramResult
from verification.verdict import GradingError

SHOWN_CHARS = 200
"""Of each text; the middle of a longer one is left out."""


class Report(msgspec.Struct, frozen=True):
    """What was run and called, in the words of the tests' process."""

    is_asked: bool = False
    """The tests asked something of the solution; whatever came later may be its doing."""
    is_complete: bool = False
    """The tests' process lived to say the rest."""
    tests_run: int = 0
    """Tests that were run to their end."""
    calls: int = 0
    """Of the solution, that it answered."""
    is_gone: bool = False
    """The solution's process ended, or broke the protocol."""
    has_failed_inside: bool = False
    """An assertion failed in a function that the tests had passed to the solution."""
    ended_by: str = ""
    """"assertion", "gone", "error"; empty when all tests were run."""
    message: str = ""

    @property
    def is_passed(self) -> bool:
        """Whether all tests were run to their end, and really called the solution."""
        is_whole = self.is_complete and not self.ended_by
        is_whole &= not self.is_gone and not self.has_failed_inside
        return is_whole and self.tests_run > 0 and self.calls > 0


def read_report(lines: bytes) -> Report:
    """The last that was reported."""
    whole = [line for line in lines.split(b"\n") if line]
    return msgspec.json.decode(whole[-1], type=Report) if whole else Report()


def make_jobs(source: str, tests: CodeTests, cases: list[Case]) -> tuple[bytes, bytes]:
    """What the solution's process and the tests' process are given.

    GradingError for tests that can grade nothing.
    """
    try:
        if tests.unit_tests:
            unit_tests, plan, imports = source_of(tests), plan_of(tests), ""
        else:
            tolerance = tests.tolerance if tests.comparison == "float" else None
            unit_tests, imports = as_unit_tests(cases, tolerance), PRELUDE
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
    """A test of input and output: both, what was printed instead, and the complaint."""
    output = result.output[: 8 * SHOWN_CHARS].decode(errors="replace")
    shown = f"input {quoted(case.stdin)}, expected {quoted(case.stdout)}, printed {quoted(output)}"
    return shown + _complaint(result.errors)


def of_unit_tests(report: Report, result: ProgramResult) -> str:
    """Unit tests: how they ended, and the complaint."""
    said = f": {quoted(report.message)}" if report.message else ""
    ended = report.ended_by or ("failed inside" if report.has_failed_inside else "not finished")
    return f"unit tests after {report.tests_run}: {ended}{said}" + _complaint(result.errors)


def of_compiler(result: ProgramResult) -> str:
    """What the compiler complained of first."""
    text = result.output[: 8 * SHOWN_CHARS].decode(errors="replace") or result.errors
    return f"compiler: {quoted(text)}"


def _complaint(errors: str) -> str:
    # A traceback ends with what happened.
    last = errors.strip().rsplit("\n", 1)[-1]
    return f", error {quoted(last)}" if last else ""


def quoted(text: str) -> str:
    """The text on one line, its middle left out where it is long."""
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        return f"{text[:half]!r}...{text[-half:]!r}"
    return repr(text)
