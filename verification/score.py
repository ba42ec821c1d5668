"""From a completion to its score: format gate -> correctness -> length.

Runs in the verifier (`score_quickly`) and in its grading processes (`TASKS`). Pure functions of
the request and the reward rules, apart from the libraries that the slow tasks load.
"""

import importlib
from collections.abc import Callable

import msgspec

from megatron_rl.protocol.types import Score, ScoreRequest
from verification import gym_answer, math_answer
from verification.format import CUT_OFF_REFUSALS, FormatCheck, check_format
from verification.verdict import CORRECT, WRONG, GradingError, Verdict

MAX_LENGTH_PENALTY = 0.1


class RewardRules(msgspec.Struct, frozen=True):
    """What a score depends on besides the completion."""

    correct_reward: float
    format_reward: float
    max_tokens: int
    """Limit of a completion, the paper's l_max."""
    margin_tokens: int
    """The paper's l_cache; 0 for no length penalty."""


Task = Callable[[ScoreRequest, RewardRules], Score]


def length_penalty(n_tokens: int, max_tokens: int, margin_tokens: int) -> float:
    """Soft penalty in [-0.1, 0] near the length limit.

    0 up to max_tokens - margin_tokens, then linear, -0.1 beyond max_tokens. A margin of 0 turns
    the penalty off.
    Source: Magistral (arXiv 2506.10910), eq. 1.
    """
    if margin_tokens == 0:
        return 0.0
    excess = n_tokens - (max_tokens - margin_tokens)
    return -MAX_LENGTH_PENALTY * min(max(excess / margin_tokens, 0.0), 1.0)


def score_math(request: ScoreRequest, rules: RewardRules) -> Score:
    """Score of a boxed answer against a mathematical reference."""
    return _score_boxed(request, rules, lambda box: math_answer.compare(box, request.answer))


def compare_exactly(box: str, reference: str) -> Verdict:
    """Correct when both texts are equal apart from surrounding space."""
    return CORRECT if box.strip() == reference.strip() else WRONG


def score_exact(request: ScoreRequest, rules: RewardRules) -> Score:
    """Score of a boxed answer that must equal the reference character by character."""
    return _score_boxed(request, rules, lambda box: compare_exactly(box, request.answer))


def score_reasoning_gym(request: ScoreRequest, rules: RewardRules) -> Score:
    """Score of a boxed answer by the scorer of its reasoning_gym dataset."""
    return _score_boxed(request, rules, lambda box: gym_answer.compare(box, request.entry))


TASKS: dict[str, Task] = {
    "math": score_math,
    "exact": score_exact,
    "reasoning_gym": score_reasoning_gym,
}

# Comparisons that need no library: they decide in the verifier itself, or leave it open (None).
_QUICK: dict[str, Callable[[str, str], Verdict | None]] = {
    "math": math_answer.compare_quickly,
    "exact": compare_exactly,
    "reasoning_gym": gym_answer.compare_quickly,
}

_PREPARE: dict[str, Callable[[], None]] = {
    "math": math_answer.prepare,
    "reasoning_gym": gym_answer.prepare,
}


def score_quickly(request: ScoreRequest, rules: RewardRules) -> Score | None:
    """Score of a completion where plain text decides; None when a grading process must.

    Raises GradingError for an unknown task. Never loads the code of a plugged-in task.
    """
    if request.task not in TASKS:
        _check_task_name(request.task)
        return None
    check = check_format(request.text)
    if not check.is_passed:
        return _refused(request, check)
    verdict = _QUICK[request.task](check.answer, request.answer)
    return None if verdict is None else _graded(request, rules, verdict)


def score_unverified(request: ScoreRequest, rules: RewardRules, reason: str) -> Score:
    """Score of a completion whose grading exceeded a limit: format and length count alone."""
    check = check_format(request.text)
    if not check.is_passed:
        return _refused(request, check)
    return _graded(request, rules, Verdict(False, reason))


def load_task(name: str) -> Task:
    """The scoring function of a task with its libraries loaded; GradingError when there is none.

    A name `package.module:function` loads a function of the same form as those in TASKS.
    """
    if name in TASKS:
        if name in _PREPARE:
            _PREPARE[name]()
        return TASKS[name]
    _check_task_name(name)
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise GradingError(f"cannot load task {name!r}: {error}") from error


def _check_task_name(name: str) -> None:
    module, _, function = name.partition(":")
    if not module or not function:
        raise GradingError(
            f"unknown task {name!r}: known are {', '.join(TASKS)}, or package.module:function"
        )


def _score_boxed(
    request: ScoreRequest, rules: RewardRules, compare: Callable[[str], Verdict]
) -> Score:
    check = check_format(request.text)
    if not check.is_passed:
        return _refused(request, check)
    return _graded(request, rules, compare(check.answer))


def _refused(request: ScoreRequest, check: FormatCheck) -> Score:
    reason = check.refusal
    if not request.is_finished and reason in CUT_OFF_REFUSALS:
        reason = "unfinished"
    return Score(reward=0.0, parts={"format": 0.0, "correct": 0.0, "length": 0.0}, reason=reason)


def _graded(request: ScoreRequest, rules: RewardRules, verdict: Verdict) -> Score:
    parts = {
        "format": rules.format_reward,
        "correct": rules.correct_reward if verdict.is_correct else 0.0,
        "length": length_penalty(request.completion_tokens, rules.max_tokens, rules.margin_tokens),
    }
    return Score(reward=sum(parts.values()), parts=parts, reason=verdict.reason)
