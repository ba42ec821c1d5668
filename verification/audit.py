"""Grades a file of completions again, for `megatron-rl verify`.

A line is a rollout record of a run, or {"text", "answer"} with optional "task", "entry",
"problem", "language", "tokens", "is_finished", "seed", "prompt_tail", "reason".
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import ExtraReward, RewardConfig
from megatron_rl.protocol.line_errors import decode_texts
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.types import Prompt, Score, ScoreFailed, ScoreRequest
from verification.library import Answer, Sample, answer_texts
from verification.math import answer as math_answer
from verification.math.library import same_by_bare_library

PARSERS = ("text", "number", "structure", "math_verify", "bare")
"""Parsers in their order; "bare" is math-verify alone, as most trainers use it."""
FAILED = "grading failed"
EXPECTED = (
    '{"text": ..., "answer": ...} with optional "task", "entry", "problem", "language", "tokens", '
    '"seed"'
)


ReadAnswers = Callable[[Answer, str], list[str]]
"""(what a line has as its answer, task) -> the accepted answers."""


class _Line(Sample, frozen=True, kw_only=True):
    """Keys that are read from a line: a sample, and what a record adds; others are ignored."""

    finish_reason: str = ""
    prompt_id: str = ""
    reason: str = ""
    stage: int = 0
    to_grade: str | None = None
    is_outcome: bool = False


KEYS = tuple(field.name for field in msgspec.structs.fields(_Line))


class Record(NamedTuple):
    """A sample with the verdict that the file holds."""

    sample: Sample
    recorded_reason: str
    """Empty if the file has none."""
    line: int = 0
    """Its line in the file, from 1."""


class LineVerdict(NamedTuple):
    """The verdict on one line."""

    line: int
    """From 1."""
    is_correct: bool | None
    """None: it could not be graded."""
    reason: str
    reward: float | None
    detail: str
    """The first test that a program failed, or why it could not be graded; else empty."""


class ReasonRow(NamedTuple):
    """How often a reason was found, with one example."""

    reason: str
    count: int
    reward: float
    """Mean reward."""
    answer: str
    reference: str


class Disagreement(NamedTuple):
    """An answer and reference on which parsers differ."""

    answer: str
    reference: str
    said: dict[str, bool | None]
    verdict: str


def read_records(
    path: Path,
    prompts: Mapping[str, Prompt],
    rules: Sequence[LengthRule] = (),
    *,
    read_answers: ReadAnswers = lambda answer, task: answer_texts(answer),
) -> list[Record]:
    """All lines of a file but outcomes of environments; InputError names the first bad one.

    prompts: by id; the source of tests and reasoning_gym entries, which records leave out.
    rules: by the stage of a line; a line of another stage gets the rule of the configuration.
    read_answers: as the reader of prompts does, so that a list in text is a list here too.
    """
    records, outcomes = [], 0
    for number, line in decode_texts(path, _Line, expected=EXPECTED):
        if line.is_outcome:
            outcomes += 1
            continue
        answers = read_answers(line.answer, line.task) or [""]
        records.append(Record(_sample(line, answers, prompts, rules), line.reason, number))
    if outcomes and not records:
        raise InputError(f"{path}: environments decided all rewards: a verifier grades none again")
    return records


def _sample(
    line: _Line,
    answers: list[str],
    prompts: Mapping[str, Prompt],
    rules: Sequence[LengthRule],
) -> Sample:
    prompt = prompts.get(line.prompt_id)
    known = {name: getattr(line, name) for name in Sample.__struct_fields__}
    known |= {
        "text": line.text if line.to_grade is None else line.to_grade,
        "answer": answers[0],
        "entry": line.entry or (prompt.entry if prompt else ""),
        "is_finished": line.is_finished and line.finish_reason != "length",
        "other_answers": [*answers[1:], *line.other_answers],
        "length_rule": rules[line.stage] if line.stage < len(rules) else None,
    }
    return Sample(**known)


def reason_rows(
    records: Sequence[Record], scores: Sequence[Score | ScoreFailed]
) -> list[ReasonRow]:
    """One row per reason, most frequent first."""
    by_reason: dict[str, list[tuple[Record, Score | ScoreFailed]]] = {}
    for record, score in zip(records, scores, strict=True):
        reason = FAILED if isinstance(score, ScoreFailed) else score.reason
        by_reason.setdefault(reason, []).append((record, score))
    rows = []
    for reason, found in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        rewards = [_reward(score) for _, score in found]
        sample, first = found[0][0].sample, found[0][1]
        example = first.reason if isinstance(first, ScoreFailed) else sample.text
        rows.append(
            ReasonRow(reason, len(found), sum(rewards) / len(found), example, str(sample.answer))
        )
    return rows


def line_verdicts(
    records: Sequence[Record], scores: Sequence[Score | ScoreFailed]
) -> list[LineVerdict]:
    """The verdict on each line, in the order of the file."""
    found = []
    for record, score in zip(records, scores, strict=True):
        if isinstance(score, ScoreFailed):
            found.append(LineVerdict(record.line, None, FAILED, None, score.reason))
        else:
            reward = _reward(score)
            told = (score.is_correct, score.reason, reward, score.detail)
            found.append(LineVerdict(record.line, *told))
    return found


def _reward(score: Score | ScoreFailed) -> float:
    """The reward without the verdicts of parsers."""
    if isinstance(score, ScoreFailed):
        return 0.0
    return sum(part for name, part in score.parts.items() if not name.startswith("says_"))


def changes(
    records: Sequence[Record], scores: Sequence[Score | ScoreFailed]
) -> dict[tuple[str, str], int]:
    """(recorded reason, reason now) -> count, for recorded reasons that changed."""
    counts: Counter[tuple[str, str]] = Counter()
    for record, score in zip(records, scores, strict=True):
        now = FAILED if isinstance(score, ScoreFailed) else score.reason
        if record.recorded_reason and record.recorded_reason != now:
            counts[record.recorded_reason, now] += 1
    return counts


def with_opinions(reward: RewardConfig) -> RewardConfig:
    """The same rewards, with each math parser's verdict as a part of the score.

    Parsers run in grading processes, since they may hang like any comparison.
    """
    tasks = [name for name, task in reward.all_tasks.items() if task.compare == "math"]
    extra = [
        ExtraReward(name=f"says_{name}", function=f"{__name__}:says_{name}", tasks=tasks)
        for name in PARSERS
    ]
    return reward.model_copy(update={"extra": [*reward.extra, *extra]})


def disagreements(
    records: Sequence[Record], scores: Sequence[Score | ScoreFailed]
) -> list[Disagreement]:
    """Pairs on which parsers and verdict disagree; each pair once."""
    found: dict[tuple[str, str], Disagreement] = {}
    for record, score in zip(records, scores, strict=True):
        if isinstance(score, ScoreFailed) or f"says_{PARSERS[0]}" not in score.parts:
            continue
        said = {name: _TO_OPINION[score.parts[f"says_{name}"]] for name in PARSERS}
        if {True, False} <= {*said.values(), score.is_correct}:
            text, reference = record.sample.text, str(record.sample.answer)
            found[text, reference] = Disagreement(text, reference, said, score.reason)
    return list(found.values())


def beside_bare(scores: Sequence[Score | ScoreFailed]) -> dict[tuple[bool, bool], int]:
    """(right by us, right by math-verify alone) -> completions, where both were asked."""
    counts: Counter[tuple[bool, bool]] = Counter()
    for score in scores:
        if not isinstance(score, ScoreFailed) and "says_bare" in score.parts:
            counts[score.is_correct, score.parts["says_bare"] == 1.0] += 1
    return counts


_TO_NUMBER = {True: 1.0, False: 0.0, None: -1.0}
_TO_OPINION = {number: opinion for opinion, number in _TO_NUMBER.items()}


def _says(parser: str, answer: str, request: ScoreRequest) -> float:
    """The opinion on the accepted answers: 1 if equal to one, 0 if to none, -1 if unknown."""
    said = [_opinions(answer, one)[parser] for one in (request.answer, *request.other_answers)]
    return _TO_NUMBER[True if True in said else None if None in said else False]


@functools.lru_cache(maxsize=16)
def _opinions(answer: str, reference: str) -> dict[str, bool | None]:
    said = math_answer.opinions(answer, reference)
    # Other texts may mean the same.
    text = said["text"] or None
    return said | {"text": text, "bare": same_by_bare_library(answer, reference)}


# `with_opinions` names them as extra rewards.
says_text, says_number, says_structure, says_math_verify, says_bare = (
    functools.partial(_says, parser) for parser in PARSERS
)
