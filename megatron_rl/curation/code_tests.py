"""`data code-tests`: compares the tests of code problems with the outputs of several solutions.

A test on which solutions disagree is dropped. If they agree and the test has no expected output or
no solution passes, their output becomes the expected one. The output has each problem once per
language. `verification/code/outputs.py` runs each solution in a process, which is killed after its
time limit.

Source: Magistral (arXiv 2506.10910), section 4.2. The shares are ours.
"""

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Annotated, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.curation.rows import Row
from megatron_rl.curation.samples import Solutions
from megatron_rl.curation.tool import (
    Outcome,
    Progress,
    Report,
    check_at_least,
    check_share,
    no_progress,
)
from verification.code.output_comparison import OUTPUT_COMPARISONS
from verification.code.outputs import Job, Printed
from verification.code.problem import LEAST_MEMORY_BYTES, MAX_TIME_S, CodeTests
from verification.code.setup import CodeLimits, longest_item_s, prepare, with_own_limits
from verification.verdict import GradingError

log = logging.getLogger(__name__)
TASK = "code"
SENTENCES = {"python": "Write the program in Python 3.", "cpp": "Write the program in C++20."}
"""Language -> sentence added to the question."""
OUTPUT_BYTES = 1 << 20
"""Maximum length of an output, because memory holds all outputs."""
ALL_CASES = 1_000_000
START_S = 60.0
"""Time of a process in addition to its programs."""


@dataclass(frozen=True)
class CodeTestOptions:
    """Rules for tests and problems to keep."""

    min_solutions: int = 3
    """Minimum number of running solutions of a problem."""
    agreement: float = 0.5
    """Minimum share of the solutions that print the same for a test."""
    relabel_agreement: float = 0.7
    """Minimum share for an output that becomes the expected one."""
    min_tests: int = 1
    """Minimum number of remaining tests of a problem."""
    languages: list[str] = field(default_factory=lambda: list(SENTENCES))
    """Languages of the versions of a problem; no name: one version, in any language."""

    def __post_init__(self) -> None:
        check_at_least("--min-solutions", self.min_solutions, 1)
        check_at_least("--min-tests", self.min_tests, 1)
        check_share("--agreement", self.agreement)
        check_share("--relabel-agreement", self.relabel_agreement, low=self.agreement)
        unknown = set(self.languages) - set(SENTENCES)
        if unknown:
            raise InputError(f"--languages: {sorted(unknown)}; expected some of {list(SENTENCES)}")


class OpenCase(msgspec.Struct, frozen=True):
    """An input, and the expected output if it is known."""

    stdin: str
    stdout: str | None = None


class Tests(msgspec.Struct, frozen=True):
    """The keys of an `entry` that this tool reads; other keys stay unchanged."""

    cases: list[OpenCase] = []
    unit_tests: str | list[str] = ""
    entry_point: str = ""
    comparison: str = "whitespace"
    tolerance: float = 1e-6
    language: str = ""
    time_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIME_S)] | None = None
    memory_bytes: Annotated[int, msgspec.Meta(ge=LEAST_MEMORY_BYTES)] | None = None
    packages: list[str] = []

    @property
    def own_limits(self) -> CodeTests:
        """The problem's own limits of a test."""
        return CodeTests(time_s=self.time_s, memory_bytes=self.memory_bytes)

    @property
    def is_examined(self) -> bool:
        """Whether outputs can be compared: no calls, no unit tests, no checker."""
        is_called = bool(self.unit_tests or self.entry_point)
        return bool(self.cases) and not is_called and self.comparison in OUTPUT_COMPARISONS


class Judged(NamedTuple):
    verdict: str
    """"kept", "relabelled", "generated", or the reason for dropping the test."""
    case: OpenCase | None = None
    """The test to write; None: dropped."""


def read_tests(row: Row) -> Tests:
    """The tests of a row; empty for another task. Raises InputError for a bad entry."""
    if row.prompt.task != TASK:
        return Tests()
    try:
        return msgspec.json.decode(row.prompt.entry, type=Tests)
    except msgspec.MsgspecError as error:
        place, is_empty = row.prompt.place, not row.prompt.entry.strip()
        wrong = "there is no entry" if is_empty else f"the entry is not the JSON of tests: {error}"
        assumed = (
            f". The row has no task and is taken as {TASK!r} (--task): give it one, such as "
            '"task": "math", if it is not a code problem'
        )
        raise InputError(
            f'{place}: {wrong}; expected {{"cases": [{{"stdin": "...", "stdout": "..."}}]}}, '
            f'"stdout" only where it is known{"" if "task" in row.fields else assumed}'
        ) from error


def run_on_tests(
    rows: Sequence[Row],
    solutions: Solutions,
    limits: CodeLimits,
    *,
    workers: int,
    progress: Progress = no_progress,
) -> tuple[dict[str, list[list[Printed]]], dict[str, int]]:
    """(row's id -> each solution's outputs for the cases, counts for the report)."""
    jobs, owners = [], []
    for row in rows:
        name = solutions.id_for(row)
        found = solutions.by_id.get(name, []) if name is not None else []
        tests = read_tests(row)
        if found and tests.is_examined:
            inputs = [case.stdin for case in tests.cases]
            allowed = with_own_limits(limits, tests.own_limits)
            jobs += [
                Job(solution.source, solution.tag, inputs, allowed, tests.packages)
                for solution in found
            ]
            owners += [row.prompt.id] * len(found)
    printed: dict[str, list[list[Printed]]] = {}
    results = run_all(jobs, workers=workers, progress=progress)
    not_run = 0
    for name, result in zip(owners, results, strict=True):
        if isinstance(result, str):
            log.warning("a solution of %s could not be run: %s", name, result)
            not_run += 1
        else:
            printed.setdefault(name, []).append(result)
    known = {solutions.id_for(row) for row in rows}
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
    """The problems with their kept tests, one version per language.

    printed, counts: from `run_on_tests`. Rows of other tasks, and with tests of calls, stay
    unchanged.
    """
    report = Report("code-tests", asdict(options), read=len(rows))
    tests_by_verdict: Counter[str] = Counter()
    kept: list[Row] = []
    unexamined = 0
    for row in rows:
        tests = read_tests(row)
        if not tests.is_examined:
            unexamined += 1
            kept.append(row)
            continue
        # Outputs of a program that fails for every input do not count.
        running = [
            outputs
            for outputs in printed.get(row.prompt.id, ())
            if any(not found.failure for found in outputs)
        ]
        if len(running) < options.min_solutions:
            report.drop(row.prompt, "too_few_solutions", f"{len(running)} that run")
            continue
        judged = [
            judge_test(case, [outputs[place] for outputs in running], tests, options)
            for place, case in enumerate(tests.cases)
        ]
        tests_by_verdict.update(test.verdict for test in judged)
        cases = [test.case for test in judged if test.case is not None]
        if len(cases) < options.min_tests:
            report.drop(row.prompt, "too_few_tests", f"{len(cases)} of {len(judged)} are left")
            continue
        if cases != tests.cases:
            report.changed["tests_changed"] += 1
        versions = _versions(_with(row, cases=cases), tests, options)
        report.added["language_version"] += len(versions) - 1
        kept += versions
    verdicts = dict(tests_by_verdict.most_common())
    report.figures = {"not_examined": unexamined, "tests": verdicts, **(counts or {})}
    return report.outcome(kept)


def judge_test(
    case: OpenCase, printed: Sequence[Printed], tests: Tests, options: CodeTestOptions
) -> Judged:
    """The result for a test, by the outputs of one or more solutions."""
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


def _versions(row: Row, tests: Tests, options: CodeTestOptions) -> list[Row]:
    """The row for each language; unchanged if its tests name a language."""
    if tests.language or not options.languages:
        return [row]
    return [
        _with(row, language=name)
        .with_question(f"{row.prompt.question.rstrip()}\n\n{SENTENCES[name]}")
        .replace(id=f"{row.prompt.id}/{name}")
        for name in options.languages
    ]


def _with(row: Row, **values: object) -> Row:
    """The row with other values in its entry."""
    entry = msgspec.json.decode(row.prompt.entry, type=dict[str, msgspec.Raw])
    return row.replace(entry=msgspec.json.encode({**entry, **values}).decode())


# --- running solutions ----------------------------------------------------------------------------


def check_sandbox(limits: CodeLimits) -> CodeLimits:
    """The limits with an isolation that works on this machine. Raises InputError without one."""
    try:
        # All tests of a problem are run, whatever their own limit.
        wide = msgspec.structs.replace(limits, output_bytes=OUTPUT_BYTES, cases=ALL_CASES)
        return prepare(wide)
    except GradingError as error:
        raise InputError(str(error)) from error


def run_all(
    jobs: Sequence[Job], *, workers: int, progress: Progress = no_progress
) -> list[list[Printed] | str]:
    """Each solution's outputs; a text if its process failed."""
    found = []
    with ThreadPoolExecutor(workers) as threads:
        for result in threads.map(_run, jobs):
            found.append(result)
            progress(len(found), len(jobs))
    return found


def _run(job: Job) -> list[Printed] | str:
    limits = job.limits
    limit_s = START_S + limits.host_patience * longest_item_s(limits, len(job.inputs))
    process = subprocess.Popen(
        [sys.executable, "-m", "verification.code.outputs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            output, errors = process.communicate(msgspec.msgpack.encode(job), timeout=limit_s)
        except subprocess.TimeoutExpired:
            # The sandboxed programs end with this process group.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"no answer within {limit_s:.0f} s"
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"exit code {process.returncode}: {' '.join(last)}"
    return msgspec.msgpack.decode(output, type=list[Printed])
