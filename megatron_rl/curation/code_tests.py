"""`data code-tests`: tests of code problems, held against what several solutions print.

A test on which solutions disagree is dropped; one that no solution passes, though they agree, gets
their output; so does one without an expected output. Problems are then there once a language.

Source: Magistral (arXiv 2506.10910), section 4.2. The shares are ours.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.curation.options import check_at_least, check_share
from megatron_rl.curation.report import Report, Tally
from megatron_rl.curation.rows import Row
from megatron_rl.curation.solutions import Solutions, run_all
from verification.code.output_comparison import OUTPUT_COMPARISONS
from verification.code.outputs import Printed
from verification.code.setup import CodeLimits

log = logging.getLogger(__name__)
TASK = "code"
SENTENCES = {"python": "Write the program in Python 3.", "cpp": "Write the program in C++20."}
"""What is added to the question of each version."""


@dataclass(frozen=True)
class CodeTestOptions:
    """When tests and problems are kept."""

    min_solutions: int = 3
    """Problems with fewer solutions that run at all are dropped."""
    agreement: float = 0.5
    """Tests on which a smaller share of the solutions prints the same are dropped."""
    relabel_agreement: float = 0.7
    """Share from which an output becomes the expected one, where no solution passes or none is
    given."""
    min_tests: int = 1
    """Problems with fewer tests left are dropped."""
    languages: tuple[str, ...] = ("python", "cpp")
    """A version of each problem for each of these; none: one version, in any language."""

    def __post_init__(self) -> None:
        check_at_least("--min-solutions", self.min_solutions, 1)
        check_at_least("--min-tests", self.min_tests, 1)
        check_share("--agreement", self.agreement)
        check_share("--relabel-agreement", self.relabel_agreement, low=self.agreement)
        unknown = set(self.languages) - set(SENTENCES)
        if unknown:
            raise InputError(f"--languages: {sorted(unknown)}; expected some of {list(SENTENCES)}")


class OpenCase(msgspec.Struct, frozen=True):
    """An input, and the output expected for it if one is given."""

    stdin: str
    stdout: str | None = None


class Tests(msgspec.Struct, frozen=True):
    """What is read of an `entry`; its other keys stay as they are."""

    cases: list[OpenCase] = []
    unit_tests: str | list[str] = ""
    entry_point: str = ""
    comparison: str = "whitespace"
    tolerance: float = 1e-6
    language: str = ""

    @property
    def is_examined(self) -> bool:
        """Whether outputs of programs can be compared: no calls, no unit tests, no checker."""
        is_called = bool(self.unit_tests or self.entry_point)
        return bool(self.cases) and not is_called and self.comparison in OUTPUT_COMPARISONS


class Outcome(NamedTuple):
    """What the tool makes of rows."""

    rows: list[Row]
    report: Report


class Judged(NamedTuple):
    """What becomes of a test."""

    verdict: str
    """"kept", "relabelled", "generated", or why it is dropped."""
    case: OpenCase | None = None
    """As it is to be; None where it is dropped."""


def read_tests(row: Row) -> Tests:
    """The tests of a row, none for another task. InputError for an entry that is none."""
    if row.prompt.task != TASK:
        return Tests()
    try:
        return msgspec.json.decode(row.prompt.entry, type=Tests)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{row.prompt.place}: the entry is not the JSON of tests: {error}; expected "
            '{"cases": [{"stdin": "...", "stdout": "..."}]}, "stdout" only where it is known'
        ) from error


def run_on_tests(
    rows: Sequence[Row],
    solutions: Solutions,
    limits: CodeLimits,
    *,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, list[list[Printed]]], dict[str, int]]:
    """(by id of the row, what each solution prints for each case; counts for the report).

    progress is told the solutions that were run, and all.
    """
    jobs, owners = [], []
    for row in rows:
        found = solutions.by_id.get(solutions.id_for(row.prompt), [])
        tests = read_tests(row)
        if found and tests.is_examined:
            inputs = [case.stdin for case in tests.cases]
            jobs += [(solution, inputs) for solution in found]
            owners += [row.prompt.id] * len(found)
    printed: dict[str, list[list[Printed]]] = {}
    results = run_all(jobs, limits, workers=workers, progress=progress)
    not_run = 0
    for name, result in zip(owners, results, strict=True):
        if isinstance(result, str):
            log.warning("a solution of %s could not be run: %s", name, result)
            not_run += 1
        else:
            printed.setdefault(name, []).append(result)
    known = {solutions.id_for(row.prompt) for row in rows}
    counts = {
        "solutions_run": len(jobs) - not_run,
        "solutions_not_run": not_run,
        "solutions_without_program": solutions.without_program,
        "solutions_of_no_problem": sum(
            len(found) for name, found in solutions.by_id.items() if name not in known
        ),
    }
    return printed, counts


def check_tests(
    rows: Sequence[Row],
    printed: Mapping[str, Sequence[list[Printed]]],
    *,
    options: CodeTestOptions,
    counts: Mapping[str, int] | None = None,
) -> Outcome:
    """The problems with the tests that are kept, in a version for each language.

    printed: by id of the row, for each solution what it prints for each case. counts: what the
    report says of the solutions, from `run_on_tests`. Rows of other tasks, and tests that are no
    inputs and outputs, stay as they are.
    """
    tally = Tally("code-tests", asdict(options), read=len(rows))
    tests_by_verdict: Counter[str] = Counter()
    kept: list[Row] = []
    unexamined = 0
    for row in rows:
        tests = read_tests(row)
        if not tests.is_examined:
            unexamined += 1
            kept.append(row)
            continue
        running = [outputs for outputs in printed.get(row.prompt.id, ()) if _runs(outputs)]
        if len(running) < options.min_solutions:
            tally.drop(row.prompt, "too_few_solutions", f"{len(running)} that run")
            continue
        judged = [
            judge_test(case, [outputs[place] for outputs in running], tests, options)
            for place, case in enumerate(tests.cases)
        ]
        tests_by_verdict.update(test.verdict for test in judged)
        cases = [test.case for test in judged if test.case is not None]
        if len(cases) < options.min_tests:
            tally.drop(row.prompt, "too_few_tests", f"{len(cases)} of {len(judged)} are left")
            continue
        if cases != tests.cases:
            tally.changed["tests_changed"] += 1
        versions = _versions(_with(row, cases=cases), tests, options)
        tally.added["language_version"] += len(versions) - 1
        kept += versions
    tally.figures = {
        "not_examined": unexamined,
        "tests": dict(tests_by_verdict.most_common()),
        **(counts or {}),
    }
    return Outcome(kept, tally.report(written=len(kept)))


def judge_test(
    case: OpenCase, printed: Sequence[Printed], tests: Tests, options: CodeTestOptions
) -> Judged:
    """What becomes of a test, by what each solution prints for it. At least one is asked."""
    is_same = OUTPUT_COMPARISONS[tests.comparison]
    classes: list[list[bytes]] = []
    for found in printed:
        if found.failure:
            continue
        for members in classes:
            if is_same(found.output, members[0], tests.tolerance):
                members.append(found.output)
                break
        else:
            classes.append([found.output])
    largest = max(classes, key=len, default=[])
    agreement = len(largest) / len(printed)
    if agreement < options.agreement:
        return Judged("low_agreement")
    if case.stdout is not None:
        expected = case.stdout.encode("utf-8", "surrogatepass")
        if any(is_same(f.output, expected, tests.tolerance) for f in printed if not f.failure):
            return Judged("kept", case)
    if agreement < options.relabel_agreement:
        return Judged("no_solution_passes" if case.stdout is not None else "no_agreed_output")
    try:
        output = Counter(largest).most_common(1)[0][0].decode()
    except UnicodeDecodeError:
        return Judged("output_is_no_text")
    verdict = "generated" if case.stdout is None else "relabelled"
    return Judged(verdict, OpenCase(case.stdin, output))


def _runs(outputs: list[Printed]) -> bool:
    """Whether a program ended well for any input: one that never does says nothing."""
    return any(not found.failure for found in outputs)


def _versions(row: Row, tests: Tests, options: CodeTestOptions) -> list[Row]:
    """The row for each language; as it is where it is bound to one."""
    if tests.language or not options.languages:
        return [row]
    return [
        _with(row, language=name)
        .with_question(f"{row.prompt.question.rstrip()}\n\n{SENTENCES[name]}")
        .with_id(f"{row.prompt.id}/{name}")
        for name in options.languages
    ]


def _with(row: Row, **values: object) -> Row:
    """With other values in its entry, all others as they are."""
    entry = msgspec.json.decode(row.prompt.entry, type=dict[str, msgspec.Raw])
    return row.with_entry(msgspec.json.encode({**entry, **values}).decode())
