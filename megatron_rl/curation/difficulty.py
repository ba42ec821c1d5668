"""`data difficulty`: keeps problems that are neither too hard nor too easy; checks their labels.

One call is one of the paper's two stages. First the samples of a strong base model, labels as they
are. Then those of a model trained on what that kept, which has graded the *whole* original set:
problems that only the first model never solved come back, and labels are held against the majority.
Which answers are the same is decided by the verifier's comparisons, in its grading processes.

Source: Magistral (arXiv 2506.10910), section 4.1.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig, VerifierConfig
from megatron_rl.curation.labels import Judgement, LabelRules, count_votes, judge, may_be_doubted
from megatron_rl.curation.options import check_at_least, check_share
from megatron_rl.curation.report import Report, Tally
from megatron_rl.curation.rows import Row
from megatron_rl.curation.samples import Sample, SampleFile, match
from megatron_rl.protocol.class_messages import ClassDone, ClassRequest
from megatron_rl.protocol.types import Prompt, ScoreFailed
from verification.library import Grading

WITHOUT_VOTE = ("reasoning_gym", "code")
"""Comparisons whose reference is in the prompt's `entry`: no answer can take its place."""
Classify = Callable[[Sequence[ClassRequest]], list[ClassDone | ScoreFailed]]


@dataclass(frozen=True)
class DifficultyOptions:
    """Which problems are kept, by the share of their samples that are right."""

    above: float = 0.0
    """Problems solved in this share of samples or less are too hard; 0: never solved."""
    up_to: float = 0.75
    """Problems solved in a larger share are too easy: mostly solved."""
    min_samples: int = 8
    """Problems with fewer graded samples are dropped: the share would be a guess."""
    labels: LabelRules = LabelRules()

    def __post_init__(self) -> None:
        check_share("--above", self.above, low=-1.0)
        check_share("--up-to", self.up_to, low=max(self.above, 0.0))
        check_at_least("--min-samples", self.min_samples, 1)


class Outcome(NamedTuple):
    """What the tool makes of rows."""

    rows: list[Row]
    report: Report


class _Doubt(NamedTuple):
    """A problem whose wrong answers are to be compared."""

    prompt: Prompt
    answers: list[str | None]
    """Of the samples that are not right."""
    correct: int


class _Checked(NamedTuple):
    """What became of a label that was doubted."""

    judgement: Judgement
    majority: int = 0
    """Samples of the answer that speaks against it."""
    majority_answer: str = ""
    failure: str = ""
    """Why nobody knows."""


def filter_difficulty(
    rows: list[Row],
    found: SampleFile,
    *,
    options: DifficultyOptions,
    reward: RewardConfig,
    classify: Classify,
) -> Outcome:
    """The problems that remain, with `pass_rate` and `samples`; `original_answer` if relabelled.

    A label is judged before the share of right samples: a problem with a wrong one looks unsolved.
    """
    matched = match(rows, found.graded)
    tally = Tally("difficulty", asdict(options), read=len(rows))
    tally.figures = {
        "samples": sum(len(samples) for samples in matched.by_id.values()),
        "samples_ungraded": found.ungraded,
        "samples_of_no_problem": matched.unmatched,
    }
    checked: dict[str, _Checked] = {}
    if options.labels.action != "keep":
        doubts, unchecked = _doubts(rows, matched.by_id, options, reward)
        tally.figures |= {"labels_compared": len(doubts), "labels_not_checked": unchecked}
        checked = _check_labels(doubts, options.labels, classify)
    kept = []
    for row in rows:
        samples = matched.by_id[row.prompt.id]
        label = checked.get(row.prompt.id, _Checked(Judgement("keep")))
        if result := _decide(row, samples, label, options=options, tally=tally):
            kept.append(result)
    return Outcome(kept, tally.report(written=len(kept)))


def _decide(
    row: Row, samples: list[Sample], label: _Checked, *, options: DifficultyOptions, tally: Tally
) -> Row | None:
    """The row as it is kept; None, and counted, if it is dropped."""
    if len(samples) < options.min_samples:
        return tally.drop(row.prompt, "too_few_samples", f"{len(samples)} graded samples")
    if label.failure:
        return tally.drop(row.prompt, "label_not_comparable", label.failure)
    solved = sum(sample.is_correct for sample in samples)
    said = f"{label.majority} of {len(samples)} samples answer {label.majority_answer!r}"
    if label.judgement.action == "drop":
        return tally.drop(row.prompt, "label_disagrees", said)
    is_relabelled = label.judgement.action == "relabel"
    if is_relabelled:
        solved = label.majority
    rate = solved / len(samples)
    if rate <= options.above:
        return tally.drop(row.prompt, "too_hard", f"{solved} of {len(samples)} samples are right")
    if rate > options.up_to:
        reason = "too_easy_when_relabelled" if is_relabelled else "too_easy"
        return tally.drop(row.prompt, reason, f"{solved} of {len(samples)} samples are right")
    if is_relabelled:
        tally.changed["relabelled"] += 1
        new = row.with_answer(label.judgement.answer)
        row = new.with_fields(original_answer=row.prompt.answer)
    return row.with_fields(pass_rate=round(rate, 6), samples=len(samples))


# --- labels -------------------------------------------------------------------------------------


def _doubts(
    rows: list[Row],
    samples_of: dict[str, list[Sample]],
    options: DifficultyOptions,
    reward: RewardConfig,
) -> tuple[list[_Doubt], int]:
    """Problems whose labels may be wrong, and how many there are on which no vote is possible.

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
        elif may_be_doubted(answers, correct=len(samples) - len(answers), rules=options.labels):
            doubts.append(_Doubt(row.prompt, answers, len(samples) - len(answers)))
    return doubts, unchecked


def _check_labels(
    doubts: list[_Doubt], rules: LabelRules, classify: Classify
) -> dict[str, _Checked]:
    """What becomes of each label, by the problem's id."""
    requests = [
        ClassRequest(
            request_id=0,
            task=doubt.prompt.task,
            # The label comes first: what is the same as it does not speak against it.
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
            checked[doubt.prompt.id] = _Checked(Judgement("keep"), failure=answer.reason)
            continue
        vote = count_votes(doubt.answers, answer.classes, correct=doubt.correct)
        judgement = judge(vote, samples=doubt.correct + len(doubt.answers), rules=rules)
        checked[doubt.prompt.id] = _Checked(judgement, vote.majority, vote.answer)
    return checked


@contextmanager
def open_classes(reward: RewardConfig, verifier: VerifierConfig) -> Iterator[Classify]:
    """Comparisons of answers in grading processes, as long as the context lasts."""
    tasks = {
        name: task.model_copy(update={"format_check": "none"})
        for name, task in reward.all_tasks.items()
    }
    with Grading(reward.model_copy(update={"tasks": tasks}), verifier) as grading:
        yield grading.classes
