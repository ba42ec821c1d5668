"""Graded samples of problems, read from what grading left behind.

Either records of rollouts (a run's folder, an evaluation's, or one file of them), or JSONL of
{"id" or "problem", "correct": [bool, ...], "answers": [str or null, ...]}. Text of models is only
taken apart here, by the format check of its task, as in the verifier; nothing is compared.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.curation.rows import Row, read_jsonl
from megatron_rl.protocol.questions import normalized
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files
from verification.format import FORMAT_CHECKS

_EXPECTED = (
    'a rollout record, or {"id" or "problem": "...", "correct": [true, ...], "answers": ["7", ...]}'
)


class Sample(NamedTuple):
    """One graded completion."""

    is_correct: bool
    answer: str | None
    """None: it gave none, or the file does not say."""


class _Line(msgspec.Struct, frozen=True):
    """The plain form: all samples of a problem."""

    correct: list[bool]
    id: str | int = ""
    problem: str = ""
    answers: list[str | None] = []


class Graded(NamedTuple):
    """Samples of one line, and whose they are."""

    id: str
    problem: str
    samples: list[Sample]


class Matched(NamedTuple):
    """Samples by problem."""

    by_id: dict[str, list[Sample]]
    """Of each row's id; empty where it has none."""
    unmatched: int
    """Samples of problems that the rows do not have."""


class SampleFile(NamedTuple):
    """What was read."""

    graded: list[Graded]
    ungraded: int
    """Completions that could not be graded: they say nothing."""


def read_samples(path: Path, reward: RewardConfig, *, label: str = "") -> SampleFile:
    """Samples of a folder with rollouts, or of a file. Raises InputError.

    label: of one evaluation of the folder; empty: all rollouts of it.
    """
    ungraded: Counter[str] = Counter()
    graded = list(_of_records(_records(path, label), reward, ungraded))
    return SampleFile(graded, ungraded.total())


def _records(path: Path, label: str) -> Iterator[RolloutRecord | Graded]:
    if path.is_dir():
        files = [file for file in rollout_files(path) if not label or file.label == label]
        if not files:
            what = f"rollouts of an evaluation {label!r}" if label else "rollouts"
            raise InputError(f"{path} has no {what}")
        for file in files:
            yield from read_records(file.path)
        return
    if label:
        raise InputError(
            f"--label {label} needs a run folder, and {path} is a file: leave --label out"
        )
    for number, raw in read_jsonl(path, dict[str, msgspec.Raw], expected=_EXPECTED):
        is_record = "text" in raw
        try:
            line = msgspec.json.decode(
                msgspec.json.encode(raw), type=RolloutRecord if is_record else _Line
            )
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}:{number}: {error}; expected {_EXPECTED}") from error
        yield line if is_record else _of_line(line, f"{path}:{number}")


def _of_line(line: _Line, place: str) -> Graded:
    if line.id == "" and not line.problem:
        raise InputError(f"{place}: neither id nor problem is given; expected {_EXPECTED}")
    if line.answers and len(line.answers) != len(line.correct):
        raise InputError(
            f"{place}: {len(line.correct)} values of correct, but {len(line.answers)} answers"
        )
    answers = line.answers or [None] * len(line.correct)
    samples = [Sample(*pair) for pair in zip(line.correct, answers, strict=True)]
    return Graded(str(line.id), line.problem, samples)


def _of_records(
    found: Iterable[RolloutRecord | Graded], reward: RewardConfig, ungraded: Counter[str]
) -> Iterator[Graded]:
    for item in found:
        if isinstance(item, Graded):
            yield item
        elif item.reward is None:
            ungraded[item.reason] += 1
        else:
            yield Graded(item.prompt_id, item.problem, [_sample(item, reward)])


def _sample(record: RolloutRecord, reward: RewardConfig) -> Sample:
    tasks = reward.all_tasks
    if record.task not in tasks:
        raise InputError(
            f"rollouts of {record.prompt_id!r} have the task {record.task!r}; known are "
            f"{', '.join(tasks)}: give the run's configuration with --config"
        )
    checked = FORMAT_CHECKS[tasks[record.task].format_check](record.text, record.prompt_tail)
    return Sample(record.reason == "correct", None if checked.refusal else checked.answer)


def match(rows: list[Row], graded: Iterable[Graded]) -> Matched:
    """Samples of each row: by the id where the question agrees or is not given, else by it.

    Ids that come from line numbers change when a file does; so the question has the last word,
    unless the row states its id.
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
    return Matched(by_id, unmatched)
