"""Reads completions that a run has graded: samples, and solutions of code problems.

The source is a folder or file of rollout records, or JSONL: samples as {"id" or "problem",
"correct": [bool, ...], "answers": [str or null, ...]}, solutions as {"id", "language", "source"}.
The task's format check extracts answers and programs, as in the verifier; nothing is compared.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.curation.rows import Row
from megatron_rl.protocol.line_errors import decode_texts
from megatron_rl.protocol.prompt import normalized
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files
from verification.format import FORMAT_CHECKS

_SAMPLES = (
    'a rollout record, or {"id" or "problem": "...", "correct": [true, ...], "answers": ["7", ...]}'
)
_SOLUTIONS = '{"id": "...", "language": "python", "source": "..."}, or records of rollouts'


class Sample(NamedTuple):
    """One graded completion."""

    is_correct: bool
    answer: str | None
    """None: no answer, or not in the file."""


class Graded(NamedTuple):
    """Samples of one line, and their problem."""

    id: str
    problem: str
    samples: list[Sample]


class SampleFile(NamedTuple):
    """Graded samples of a file or folder."""

    graded: list[Graded]
    ungraded: int
    """Number of completions that could not be graded."""
    unanswered: int = 0
    """Number of wrong samples of lines without `answers`."""


class Solution(NamedTuple):
    """A program for a problem."""

    source: str
    tag: str
    """Its language, as the tag of a code fence."""


class Solutions(NamedTuple):
    """Solutions of a file or folder."""

    by_id: dict[str, list[Solution]]
    without_program: int
    """Number of completions in which the format check found no program."""
    id_of: dict[str, str] = {}
    """Normalized question of a record -> its id, which evaluation sets change."""
    question_of: dict[str, str] = {}
    """Id of a record -> its normalized question."""

    def id_for(self, row: Row) -> str | None:
        """The id of a row's solutions, by the rule of `match`; None: there are none."""
        name, asked = row.prompt.id, normalized(row.prompt.question)
        agrees = "id" in row.fields or self.question_of.get(name, asked) == asked
        return name if name in self.by_id and agrees else self.id_of.get(asked)


class _SampleLine(msgspec.Struct, frozen=True):
    correct: list[bool]
    id: str | int = ""
    problem: str = ""
    answers: list[str | None] = []


class _SolutionLine(msgspec.Struct, frozen=True):
    id: str | int
    source: str
    language: str = "python"


def read_samples(
    path: Path, reward: RewardConfig, *, label: str = "", tags: ThinkTags = HOUSE_TAGS
) -> SampleFile:
    """Samples of a folder with rollouts, or of a file. Raises InputError.

    label: one evaluation of the folder; empty: all of its rollouts.
    """
    graded, ungraded, unanswered = [], 0, 0
    for place, item in _records(path, _SampleLine, _SAMPLES, label=label):
        if isinstance(item, _SampleLine):
            graded.append(_graded(item, place))
            unanswered += 0 if item.answers else item.correct.count(False)
        elif item.reward is None:
            ungraded += 1
        else:
            graded.append(Graded(item.prompt_id, item.problem, [_sample(item, reward, tags)]))
    return SampleFile(graded, ungraded, unanswered)


def read_solutions(path: Path, reward: RewardConfig, *, tags: ThinkTags = HOUSE_TAGS) -> Solutions:
    """Solutions by problem, of a folder with rollouts or a file. Raises InputError."""
    by_id: dict[str, list[Solution]] = {}
    id_of: dict[str, str] = {}
    question_of: dict[str, str] = {}
    without = 0
    for _, item in _records(path, _SolutionLine, _SOLUTIONS):
        if isinstance(item, _SolutionLine):
            by_id.setdefault(str(item.id), []).append(Solution(item.source, item.language))
            continue
        if item.problem:
            asked = normalized(item.problem)
            id_of.setdefault(asked, item.prompt_id)
            question_of.setdefault(item.prompt_id, asked)
        task = reward.all_tasks.get(item.task)
        if task is None or task.format_check not in ("think_code", "code"):
            without += 1
            continue
        checked = FORMAT_CHECKS[task.format_check](item.text, item.prompt_tail, tags)
        if checked.refusal:
            without += 1
        else:
            solution = Solution(checked.answer, checked.tag)
            by_id.setdefault(item.prompt_id, []).append(solution)
    return Solutions(by_id, without, id_of, question_of)


def _records(
    path: Path, plain: Any, expected: str, *, label: str = ""
) -> Iterator[tuple[str, Any]]:
    """(place, RolloutRecord or line of the type `plain`) of a folder or file."""
    if path.is_dir():
        files = [file for file in rollout_files(path) if not label or file.label == label]
        if not files:
            what = f"rollouts of an evaluation {label!r}" if label else "rollouts"
            raise InputError(f"{path} has no {what}")
        for file in files:
            yield from ((str(file.path), record) for record in read_records(file.path))
        return
    if label:
        raise InputError(
            f"--label {label} needs a run folder, and {path} is a file: leave --label out"
        )
    for number, raw in decode_texts(path, dict[str, msgspec.Raw], expected=expected):
        kind = RolloutRecord if "text" in raw else plain
        try:
            yield f"{path}:{number}", msgspec.json.decode(msgspec.json.encode(raw), type=kind)
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}:{number}: {error}; expected {expected}") from error


def _graded(line: _SampleLine, place: str) -> Graded:
    if line.id == "" and not line.problem:
        raise InputError(f"{place}: neither id nor problem is given; expected {_SAMPLES}")
    if line.answers and len(line.answers) != len(line.correct):
        raise InputError(
            f"{place}: {len(line.correct)} values of correct, but {len(line.answers)} answers"
        )
    answers = line.answers or [None] * len(line.correct)
    samples = [Sample(*pair) for pair in zip(line.correct, answers, strict=True)]
    return Graded(str(line.id), line.problem, samples)


def _sample(record: RolloutRecord, reward: RewardConfig, tags: ThinkTags) -> Sample:
    tasks = reward.all_tasks
    if record.task not in tasks:
        raise InputError(
            f"rollouts of {record.prompt_id!r} have the task {record.task!r}; known are "
            f"{', '.join(tasks)}: give the run's configuration with --config"
        )
    check = FORMAT_CHECKS[tasks[record.task].format_check]
    checked = check(record.text, record.prompt_tail, tags)
    return Sample(record.reason == "correct", None if checked.refusal else checked.answer)


def match(rows: list[Row], graded: Iterable[Graded]) -> tuple[dict[str, list[Sample]], int]:
    """(samples of each row by its id, number of samples of no row).

    A row's samples have its stated id, else its question. Ids from line numbers change with the
    file, so such an id counts only if the question agrees or is missing.
    """
    by_id: dict[str, list[Sample]] = {row.prompt.id: [] for row in rows}
    question_of = {row.prompt.id: normalized(row.prompt.question) for row in rows}
    stated = {row.prompt.id for row in rows if "id" in row.fields}
    id_of = {question: name for name, question in question_of.items()}
    unmatched = 0
    for item in graded:
        asked = normalized(item.problem)
        if item.id in by_id and (not asked or item.id in stated or question_of[item.id] == asked):
            by_id[item.id] += item.samples
        elif asked in id_of:
            by_id[id_of[asked]] += item.samples
        else:
            unmatched += len(item.samples)
    return by_id, unmatched
