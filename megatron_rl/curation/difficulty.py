"""`data difficulty`: keeps problems of medium difficulty, and checks their labels.

The paper applies this step twice: to samples of a strong base model, without checking labels; then
to samples of the *whole* original set by a model trained on the kept problems. The second time,
problems that only the first model never solved return, and labels are compared with the majority.
The verifier's comparisons, in grading processes, decide which answers are the same.

A label is doubted when one other answer has at least `label_share` of a problem's n samples, and
the label at most `max_label_share`. For n = 16 and the defaults (at least 10 samples of one other
answer, at most 1 of the label):

- Let the model solve a problem with probability p, and give its wrong label with probability q. The
  label is doubted with probability at least P(B(n, p) >= 10) - P(B(n, q) >= 2). For p = 0.8 the
  first term is 0.973, and grows with p; the second is 0.011 for q = 0.01. So at least 96 % of such
  labels are found, and 90 % for q <= 0.027. If all wrong samples give the wrong label (q = 0.2), 11
  % are found: a label that a model often gives itself is not evidence against it.
- A right label is doubted with probability at most min(P(B(n, p) <= 1), sum over wrong answers j of
  P(B(n, r_j) >= 10)), where the model gives answer j with probability r_j. The first term is below
  0.8 % from p = 0.36 on; the second is below 0.2 % for each answer with r_j <= 0.25, so below 0.8 %
  for all. Problems with the same mistake in more than a quarter of the samples, and p < 0.36, may
  be dropped as well: no vote can distinguish a frequent mistake from a wrong label.

Source: Magistral (arXiv 2506.10910), section 4.1: problems whose majority answer disagrees with the
label are dropped. The shares are ours.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig, VerifierConfig
from megatron_rl.curation.rows import Row
from megatron_rl.curation.samples import Sample, SampleFile, match
from megatron_rl.curation.tool import Outcome, Report, check_at_least, check_share
from megatron_rl.protocol.types import NO_ANSWER, ClassDone, ClassRequest, Prompt, ScoreFailed
from verification.library import Grading

WITHOUT_VOTE = ("reasoning_gym", "code")
"""Comparisons with the prompt's `entry`, which no answer can replace."""
Classify = Callable[[Sequence[ClassRequest]], list[ClassDone | ScoreFailed]]
Action = Literal["keep", "drop", "relabel"]
_ROUNDING = 1e-9


@dataclass(frozen=True)
class DifficultyOptions:
    """Rules for problems to keep, by the share of right samples, and for doubted labels."""

    labels: Action = "keep"
    """Treatment of doubted labels. keep: labels are not checked; drop: their problems are dropped;
    relabel: the majority's answer replaces them, or their problems are dropped."""
    label_share: float = 0.6
    """Minimum share of the samples with an answer that speaks against the label."""
    max_label_share: float = 0.1
    """Maximum share of samples with a doubted label."""
    relabel_share: float = 0.8
    """Minimum share of samples with an answer that replaces the label."""
    above: float = 0.0
    """Maximum share of right samples of a problem that is too hard; 0: never solved."""
    up_to: float = 0.75
    """Maximum share of right samples of a kept problem; others are too easy."""
    min_samples: int = 8
    """Minimum number of graded samples, without which the share would be a guess."""

    def __post_init__(self) -> None:
        check_share("--label-share", self.label_share)
        check_share("--max-label-share", self.max_label_share)
        check_share("--relabel-share", self.relabel_share)
        if self.max_label_share >= self.label_share:
            raise InputError(
                f"--max-label-share={self.max_label_share:g} must be below "
                f"--label-share={self.label_share:g}: else label and majority are no rivals"
            )
        check_share("--above", self.above, low=-1.0)
        check_share("--up-to", self.up_to, low=max(self.above, 0.0))
        check_at_least("--min-samples", self.min_samples, 1)
        if self.labels == "relabel" and self.relabel_share > self.up_to:
            raise InputError(
                f"--relabel-share={self.relabel_share:g} must be at most --up-to={self.up_to:g} "
                "with --labels relabel: every relabelled problem would be too easy. Give --up-to "
                "0.95, to drop only problems that are nearly always solved, or --labels drop"
            )


class Vote(NamedTuple):
    """Counts of samples with the label and with the most frequent other answer."""

    produced: int
    """Samples with the label, in any form."""
    majority: int
    answer: str
    """Most frequent form of the other answer."""


class _Doubt(NamedTuple):
    """A problem with wrong answers to compare."""

    prompt: Prompt
    answers: list[str | None]
    """Answers of the wrong samples."""
    correct: int


class _Checked(NamedTuple):
    action: Action = "keep"
    vote: Vote = Vote(0, 0, "")
    failure: str = ""
    """Reason for a failed comparison."""


def filter_difficulty(
    rows: list[Row],
    found: SampleFile,
    *,
    options: DifficultyOptions,
    reward: RewardConfig,
    classify: Classify,
) -> Outcome:
    """The kept problems, with `pass_rate` and `samples`, and `original_answer` if relabelled.

    Labels come first, because a wrong label makes a problem look unsolved.
    """
    samples_of, unmatched = match(rows, found.graded)
    report = Report("difficulty", asdict(options), read=len(rows))
    report.figures = {
        "samples": sum(map(len, samples_of.values())),
        "samples_ungraded": found.ungraded,
        "samples_of_no_problem": unmatched,
    }
    checked: dict[str, _Checked] = {}
    if options.labels != "keep":
        report.figures["wrong_samples_without_answers"] = _check_answers(found, options)
        doubts, unchecked = _doubts(rows, samples_of, options, reward)
        report.figures |= {"labels_compared": len(doubts), "labels_not_checked": unchecked}
        checked = _check_labels(doubts, options, classify)
    kept = []
    for row in rows:
        samples = samples_of[row.prompt.id]
        label = checked.get(row.prompt.id, _Checked())
        if result := _decide(row, samples, label, options=options, report=report):
            kept.append(result)
    return report.outcome(kept)


def _check_answers(found: SampleFile, options: DifficultyOptions) -> int:
    """Number of wrong samples whose lines have no answers.

    Raises InputError if these are all wrong samples: no label would be checked.
    """
    wrong = sum(not sample.is_correct for item in found.graded for sample in item.samples)
    if found.unanswered and found.unanswered == wrong:
        raise InputError(
            f'--labels {options.labels}: no line of the samples with a wrong sample has "answers", '
            'so no label can be checked. Add "answers" (one text or null for each sample), or give '
            "--labels keep"
        )
    return found.unanswered


def _decide(
    row: Row, samples: list[Sample], label: _Checked, *, options: DifficultyOptions, report: Report
) -> Row | None:
    """The row to write; None if it is dropped and counted."""
    if len(samples) < options.min_samples:
        return report.drop(row.prompt, "too_few_samples", f"{len(samples)} graded samples")
    if label.failure:
        return report.drop(row.prompt, "label_not_comparable", label.failure)
    solved = sum(sample.is_correct for sample in samples)
    if label.action == "drop":
        said = f"{label.vote.majority} of {len(samples)} samples answer {label.vote.answer!r}"
        return report.drop(row.prompt, "label_disagrees", said)
    is_relabelled = label.action == "relabel"
    if is_relabelled:
        solved = label.vote.majority
    rate = solved / len(samples)
    if rate <= options.above:
        return report.drop(row.prompt, "too_hard", f"{solved} of {len(samples)} samples are right")
    if rate > options.up_to:
        reason = "too_easy_when_relabelled" if is_relabelled else "too_easy"
        return report.drop(row.prompt, reason, f"{solved} of {len(samples)} samples are right")
    if is_relabelled:
        report.changed["relabelled"] += 1
        original = row.prompt.answer
        row = row.replace(answer=label.vote.answer).with_fields(original_answer=original)
    return row.with_fields(pass_rate=round(rate, 6), samples=len(samples))


# --- labels -------------------------------------------------------------------------------------


def _doubts(
    rows: list[Row],
    samples_of: dict[str, list[Sample]],
    options: DifficultyOptions,
    reward: RewardConfig,
) -> tuple[list[_Doubt], int]:
    """(problems with labels that may be wrong, number of problems without a possible vote).

    Raises InputError for an unknown task.
    """
    doubts, unchecked = [], 0
    for row in rows:
        task = reward.all_tasks.get(row.prompt.task)
        if task is None:
            raise InputError(
                f"{row.prompt.place}: unknown task {row.prompt.task!r}; known are "
                f"{', '.join(reward.all_tasks)}: give a configuration with --config"
            )
        samples = samples_of[row.prompt.id]
        answers = [sample.answer for sample in samples if not sample.is_correct]
        if task.compare in WITHOUT_VOTE:
            unchecked += 1
        elif may_be_doubted(answers, correct=len(samples) - len(answers), rules=options):
            doubts.append(_Doubt(row.prompt, answers, len(samples) - len(answers)))
    return doubts, unchecked


def _check_labels(
    doubts: list[_Doubt], rules: DifficultyOptions, classify: Classify
) -> dict[str, _Checked]:
    """The result for each label, by the problem's id."""
    requests = [
        ClassRequest(
            request_id=0,
            task=doubt.prompt.task,
            # The label is first: `count_votes` needs its class.
            texts=[doubt.prompt.answer, *(answer or "" for answer in doubt.answers)],
            prompt_tails=[""] * (1 + len(doubt.answers)),
            problem=doubt.prompt.question,
            entry=doubt.prompt.entry,
        )
        for doubt in doubts
    ]
    checked = {}
    for doubt, answer in zip(doubts, classify(requests), strict=True):
        if isinstance(answer, ScoreFailed):
            checked[doubt.prompt.id] = _Checked(failure=answer.reason)
            continue
        vote = count_votes(doubt.answers, answer.classes, correct=doubt.correct)
        action = judge(vote, samples=doubt.correct + len(doubt.answers), rules=rules)
        checked[doubt.prompt.id] = _Checked(action, vote)
    return checked


@contextmanager
def open_classes(reward: RewardConfig, verifier: VerifierConfig) -> Iterator[Classify]:
    """Start grading processes that compare answers; they end with the context."""
    tasks = {
        name: task.model_copy(update={"format_check": "none"})
        for name, task in reward.all_tasks.items()
    }
    with Grading(reward.model_copy(update={"tasks": tasks}), verifier) as grading:
        yield grading.classes


def least(share: float, samples: int) -> int:
    """The smallest count that is at least this share of the samples."""
    return math.ceil(share * samples - _ROUNDING)


def most(share: float, samples: int) -> int:
    """The largest count that is at most this share of the samples."""
    return math.floor(share * samples + _ROUNDING)


def may_be_doubted(
    answers: Sequence[str | None], *, correct: int, rules: DifficultyOptions
) -> bool:
    """Whether any classes of the wrong answers could speak against the label.

    This check spares most problems the comparisons.
    """
    samples = len(answers) + correct
    given = sum(answer is not None for answer in answers)
    enough = given >= max(1, least(rules.label_share, samples))
    return enough and correct <= most(rules.max_label_share, samples)


def count_votes(answers: Sequence[str | None], classes: Sequence[int], *, correct: int) -> Vote:
    """The vote of the wrong answers. classes: of the label, then of each answer."""
    label, *others = classes
    same_as_label = sum(found == label != NO_ANSWER for found in others)
    sizes = Counter(found for found in others if found not in (label, NO_ANSWER))
    if not sizes:
        return Vote(correct + same_as_label, 0, "")
    majority, size = sizes.most_common(1)[0]
    texts = Counter(
        answer.strip()
        for answer, found in zip(answers, others, strict=True)
        if found == majority and answer is not None
    )
    return Vote(correct + same_as_label, size, texts.most_common(1)[0][0])


def judge(vote: Vote, *, samples: int, rules: DifficultyOptions) -> Action:
    """The decision about a label after a vote of `samples`."""
    speaks = vote.majority >= max(1, least(rules.label_share, samples))
    if not speaks or vote.produced > most(rules.max_label_share, samples):
        return "keep"
    is_clear = vote.majority >= least(rules.relabel_share, samples)
    return "relabel" if rules.labels == "relabel" and is_clear else "drop"
