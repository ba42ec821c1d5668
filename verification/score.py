"""From a completion to its score: gate -> correctness -> length -> language -> extra rewards.

`score_quickly` runs in the verifier, `score` in its grading processes. Functions of the request
and the rules, apart from the libraries that the judges load.
"""

import math
from functools import cache

from megatron_rl.protocol.reward_config import CUSTOM, LANGUAGE, ExtraReward
from megatron_rl.protocol.types import Score, ScoreRequest
from verification import language
from verification.comparisons import find_comparison, load_function
from verification.gates import CUT_OFF_REFUSALS, GATES, Gated
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


def score(request: ScoreRequest, rules: RewardRules) -> Score:
    """The score of a completion. GradingError for our own failure.

    Unbounded in time and memory: call it only in a grading process.
    """
    gated = _gate(request, rules)
    if gated.refusal:
        return _refused(request, gated)
    comparison = find_comparison(rules.task(request.task).compare)
    verdict = comparison.quick(gated, request, rules) or comparison.judge(gated, request, rules)
    parts = _basic_parts(request, rules, verdict)
    if rules.is_language_judged:
        parts["language"] = rules.reward.language * _is_in_one_language(gated, request, rules)
    for extra in _extras_of(request, rules):
        parts[extra.name] = extra.weight * _extra(extra, gated, request)
    return Score(sum(parts.values()), parts, verdict.reason)


def score_quickly(request: ScoreRequest, rules: RewardRules) -> Score | None:
    """The score where plain text decides all of it; None when a grading process must.

    GradingError for an unknown task. Never loads functions of the user's own.
    """
    gated = _gate(request, rules)
    if gated.refusal:
        return _refused(request, gated)
    verdict = _quick_verdict(gated, request, rules)
    if verdict is None or rules.is_language_judged or _extras_of(request, rules):
        return None
    parts = _basic_parts(request, rules, verdict)
    return Score(sum(parts.values()), parts, verdict.reason)


def lane_of(request: ScoreRequest, rules: RewardRules) -> str:
    """The lane of grading processes that has to score a request that `score_quickly` left open."""
    if _extras_of(request, rules):
        return CUSTOM
    if _quick_verdict(_gate(request, rules), request, rules) is not None:
        return LANGUAGE
    return rules.task(request.task).lane


def score_unverified(request: ScoreRequest, rules: RewardRules, reason: str) -> Score:
    """The score of a completion whose grading exceeds a limit: gate and length count alone."""
    gated = _gate(request, rules)
    if gated.refusal:
        return _refused(request, gated)
    parts = _basic_parts(request, rules, Verdict(False, reason))
    return Score(sum(parts.values()), parts, reason)


def prepare(task: str, rules: RewardRules) -> None:
    """Load what scoring a task needs, so that no completion pays for it. GradingError."""
    comparison = find_comparison(rules.task(task).compare)
    if comparison.prepare is not None:
        comparison.prepare()
    if rules.is_language_judged:
        language.prepare()


def _gate(request: ScoreRequest, rules: RewardRules) -> Gated:
    return GATES[rules.task(request.task).gate](request.text, request.prompt_tail)


def _quick_verdict(gated: Gated, request: ScoreRequest, rules: RewardRules) -> Verdict | None:
    name = rules.task(request.task).compare
    # A function of the user's own is not loaded here.
    return None if ":" in name else find_comparison(name).quick(gated, request, rules)


def _refused(request: ScoreRequest, gated: Gated) -> Score:
    reason = gated.refusal
    if not request.is_finished and reason in CUT_OFF_REFUSALS:
        reason = "unfinished"
    return Score(reward=0.0, parts={"format": 0.0, "correct": 0.0, "length": 0.0}, reason=reason)


def _basic_parts(request: ScoreRequest, rules: RewardRules, verdict: Verdict) -> dict[str, float]:
    reward = rules.reward
    return {
        "format": reward.format,
        "correct": reward.correct if verdict.is_correct else 0.0,
        "length": length_penalty(
            request.completion_tokens,
            rules.max_tokens,
            reward.length_margin_tokens,
            largest=reward.length,
        ),
    }


def _is_in_one_language(gated: Gated, request: ScoreRequest, rules: RewardRules) -> bool:
    return language.check_language(
        problem=request.problem,
        thoughts=gated.thoughts,
        answer=gated.final,
        target=request.language,
        rules=_language_rules(rules.reward.language_confidence),
    ).is_consistent


@cache
def _language_rules(confidence: float) -> language.LanguageRules:
    return language.LanguageRules(min_confidence=confidence)


def _extras_of(request: ScoreRequest, rules: RewardRules) -> list[ExtraReward]:
    return [e for e in rules.reward.extra if not e.tasks or request.task in e.tasks]


def _extra(extra: ExtraReward, gated: Gated, request: ScoreRequest) -> float:
    function = load_function(extra.function, key=f"reward.extra {extra.name!r}: function")
    value = function(gated.answer, request)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise GradingError(f"{extra.function!r} returned {value!r:.80}, expected a finite number")
    return float(value)
