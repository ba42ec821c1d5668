"""From a completion to its score: format check -> correctness -> length -> language -> extra
rewards.

The verifier calls `screen` once per request. Its grading processes call `take_step` once per step
that is left, or for a pair of answers (`classes.py`). All are functions of their arguments, apart
from the libraries that the judges load.
"""

from collections.abc import Callable

from megatron_rl.config.reward import ExtraReward, StepKind
from megatron_rl.protocol.limits import LARGEST_PART
from megatron_rl.protocol.types import Score, ScoreRequest
from verification import language
from verification.comparisons import call_function, describe_type, find_comparison, load_function
from verification.draft import Draft, Finding, Question
from verification.format import CUT_OFF_REFUSALS, FORMAT_CHECKS, FormatResult
from verification.rules import RewardRules
from verification.verdict import GradingError, Verdict


def length_penalty(
    n_tokens: int, max_tokens: int, margin_tokens: int, *, largest: float = 0.1
) -> float:
    """Soft penalty in [-largest, 0] near the length limit.

    0 up to max_tokens - margin_tokens, then linear, -largest beyond max_tokens. A margin of 0 turns
    the penalty off.
    Source: Magistral (arXiv 2506.10910), eq. 1.
    """
    if margin_tokens == 0:
        return 0.0
    excess = n_tokens - (max_tokens - margin_tokens)
    return -largest * min(max(excess / margin_tokens, 0.0), 1.0)


def screen(request: ScoreRequest, rules: RewardRules) -> Score | Draft:
    """The score where the format check or plain text decides all of it; else a draft with steps to
    take.

    Quick and safe for any text, and the only caller of format checks and quick comparisons. Never
    loads a user's functions. GradingError for an unknown task.
    """
    task = rules.task(request.task)
    checked = FORMAT_CHECKS[task.format_check](request.text, request.prompt_tail, rules.tags)
    if checked.refusal:
        return _refused(request, checked)
    steps = rules.reward.steps_of(request.task)
    draft = Draft(request, checked, steps, Finding(_basic_parts(request, rules)))
    verdict = find_comparison(task.compare).quick(checked, request, rules)
    return draft if verdict is None else draft.add(_judged(verdict, rules))


def take_step(question: Question, rules: RewardRules) -> Finding:
    """The finding of one step. GradingError for our own failure.

    Unbounded in time and memory: call it only in a grading process.
    """
    return _STEPS[question.kind](question, rules)


def score(request: ScoreRequest, rules: RewardRules) -> Score:
    """The score of a completion, with all steps in this process, in grading order.

    As unbounded as `take_step`. The verifier does the same across its processes.
    """
    found = screen(request, rules)
    while isinstance(found, Draft):
        found = found.add(take_step(found.question, rules))
    return found


def unverified(draft: Draft, rules: RewardRules, reason: str) -> Score:
    """The score of a completion whose grading exceeded a limit: only format and length count."""
    parts = _basic_parts(draft.request, rules)
    return Score(sum(parts.values()), parts, reason)


def prepare(kind: StepKind, task: str, rules: RewardRules) -> None:
    """Load what a step of a task needs, so that no completion pays for it. GradingError."""
    if kind == "language":
        language.prepare()
    elif kind == "extras":
        for extra in rules.reward.extras_of(task):
            _load_extra(extra)
    else:
        comparison = find_comparison(rules.task(task).compare)
        if comparison.prepare is not None:
            comparison.prepare()


def _refused(request: ScoreRequest, checked: FormatResult) -> Score:
    reason = checked.refusal
    if not request.is_finished and reason in CUT_OFF_REFUSALS:
        reason = "unfinished"
    return Score(reward=0.0, parts={"format": 0.0, "correct": 0.0, "length": 0.0}, reason=reason)


def _basic_parts(request: ScoreRequest, rules: RewardRules) -> dict[str, float]:
    """Addends of the reward that are known before the answer is judged."""
    length = request.length_rule or rules.length_rule
    return {
        "format": rules.reward.format,
        "correct": 0.0,
        "length": length_penalty(
            request.completion_tokens,
            length.max_tokens,
            length.margin_tokens,
            largest=length.largest,
        ),
    }


# --- steps --------------------------------------------------------------------------------------


def _judge(question: Question, rules: RewardRules) -> Finding:
    comparison = find_comparison(rules.task(question.request.task).compare)
    return _judged(comparison.judge(question.checked, question.request, rules), rules)


def _judged(verdict: Verdict, rules: RewardRules) -> Finding:
    share = 1.0 if verdict.is_correct else 0.0
    if rules.reward.code_credit == "proportional" and any(verdict.tests):
        passed, tests = verdict.tests
        share = passed / tests
    parts = {"correct": rules.reward.correct * share}
    return Finding(parts, verdict.reason, verdict.tests, verdict.detail)


def _judge_language(question: Question, rules: RewardRules) -> Finding:
    request, checked = question.request, question.checked
    format_check = rules.task(request.task).format_check
    has_thoughts = format_check.startswith("think") and not rules.tags.is_closed_by(
        request.prompt_tail
    )
    found = language.check_language(
        problem=request.problem,
        thoughts=checked.thoughts if has_thoughts or checked.thoughts.strip() else None,
        answer=checked.final,
        target=request.language,
        min_confidence=rules.reward.language_confidence,
    )
    return Finding({"language": rules.reward.language * found.is_consistent})


def _judge_extras(question: Question, rules: RewardRules) -> Finding:
    extras = rules.reward.extras_of(question.request.task)
    return Finding({extra.name: extra.weight * _extra(extra, question) for extra in extras})


def _extra(extra: ExtraReward, question: Question) -> float:
    arguments = question.checked.answer, question.request
    value = call_function(_load_extra(extra), extra.function, *arguments)
    largest = LARGEST_PART / max(1.0, abs(extra.weight))
    # NaN is not below anything.
    if not isinstance(value, int | float) or not abs(value) <= largest:
        raise GradingError(
            f"{extra.function!r} returned {describe_type(value)}, expected one finite number, an "
            f"int or a float from -{largest:g} to {largest:g}, for one completion: as in "
            "`return float(...)`"
        )
    return float(value)


def _load_extra(extra: ExtraReward) -> Callable[..., object]:
    return load_function(extra.function, key=f"reward.extra {extra.name!r}: function")


def _compare_pair(question: Question, rules: RewardRules) -> Finding:
    judge = find_comparison(rules.task(question.request.task).compare).equivalence.judge
    assert judge is not None, "texts decide about pairs of this task"
    return Finding({}, judge(question.checked, question.request, rules).reason)


_STEPS: dict[StepKind, Callable[[Question, RewardRules], Finding]] = {
    "judge": _judge,
    "language": _judge_language,
    "extras": _judge_extras,
    "pair": _compare_pair,
}
