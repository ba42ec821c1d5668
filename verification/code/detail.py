"""What a reader of a verdict is told of the test that a program failed: short, safe to print.

A program wrote most of it: it is quoted as Python would, so that it holds no line end, no control
character and no mark that turns text around. Pure.
"""

from verification.code.checking import Report
from verification.code.problem import Case
from verification.sandbox.sandbox import ProgramResult

SHOWN_CHARS = 200
"""Of each text; the middle of a longer one is left out."""


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
