"""Whether an answer is right: the table COMPARISONS, and functions that a user names.

`quick` halves are string code and run in the verifier itself; `judge` runs in a grading process.
Two wrong answers are compared in the same way: one serves as the reference. A request may have
several accepted answers: an answer is right if it equals any.
"""

import asyncio
import contextlib
import inspect
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import find_function, where_raised
from megatron_rl.config.reward import RewardConfig
from megatron_rl.protocol.types import ScoreRequest
from verification import gym_answer
from verification.code import grading
from verification.code.problem import parse_tests
from verification.code.setup import CodeLimits
from verification.format import FormatResult
from verification.math import answer as math_answer
from verification.math.unevaluated import UNEVALUATED, is_unevaluated
from verification.rules import RewardRules
from verification.verdict import CORRECT, WRONG, GradingError, Verdict

FORKED = "forked and its child returned: end the child by os._exit, as multiprocessing does"
"""What stderr says of a user's function, behind its name. `environments/fork_server.py` says the
same; its Python may lack this package."""
Judge = Callable[[FormatResult, ScoreRequest, RewardRules], Verdict]
QuickJudge = Callable[[FormatResult, ScoreRequest, RewardRules], Verdict | None]


def _undecided(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> None:
    return None


def _without_spacing(answer: str) -> str:
    return " ".join(answer.split())


@dataclass(frozen=True)
class Equivalence:
    """Which wrong answers are the same: by default, those of equal text.

    So programs of different text are different answers, whatever they print. The same holds for
    reasoning_gym, whose scorers compare an answer only with its reference.
    """

    form: Callable[[str], str] = str.strip
    """Answers of the same form are the same."""
    judge: Judge | None = None
    """Verdict on an answer of another form, with the other answer as the reference. None: they
    differ."""
    quick: QuickJudge = _undecided
    """The same verdict if plain text decides, else None."""


@dataclass(frozen=True)
class Comparison:
    """One way to judge an answer."""

    judge: Judge
    """The verdict if `quick` returns None."""
    quick: QuickJudge = _undecided
    """Verdict if plain text decides, else None."""
    prepare: Callable[[], None] | None = None
    """Loads what `judge` needs, so that no completion pays for it."""
    equivalence: Equivalence = Equivalence()
    """Which wrong answers are the same."""


def _with_each_answer(request: ScoreRequest) -> list[ScoreRequest]:
    """The request with each accepted answer alone."""
    if not request.other_answers:
        return [request]
    answers = [request.answer, *request.other_answers]
    return [msgspec.structs.replace(request, answer=a, other_answers=[]) for a in answers]


def _best(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on an answer by those against each accepted answer."""
    right = [verdict for verdict in verdicts if verdict.is_correct]
    # An answer that equals an accepted one in value says more than one that equals none.
    return (right or [v for v in verdicts if v == UNEVALUATED] or list(verdicts))[0]


def any_answer_quickly(quick: Callable[..., Verdict | None]) -> QuickJudge:
    """The quick comparison with all accepted answers: None unless plain text decides."""

    def judge(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict | None:
        verdicts: list[Verdict] = []
        is_open = False
        for one in _with_each_answer(request):
            verdict = quick(checked, one, rules)
            if verdict is not None and verdict.is_correct:
                return verdict
            is_open |= verdict is None
            verdicts += [] if verdict is None else [verdict]
        return None if is_open else _best(verdicts)

    return judge


def any_answer(judge: Judge, quick: QuickJudge) -> Judge:
    """The comparison with all accepted answers, of which plain text leaves one undecided."""

    def judge_each(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
        if not request.other_answers:
            return judge(checked, request, rules)
        verdicts = []
        for one in _with_each_answer(request):
            # `quick` also refuses pairs that would keep `judge` busy.
            verdict = quick(checked, one, rules) or judge(checked, one, rules)
            if verdict.is_correct:
                return verdict
            verdicts.append(verdict)
        return _best(verdicts)

    return judge_each


def exact_text(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
    """Right when both texts are equal apart from surrounding space."""
    return CORRECT if checked.answer.strip() == request.answer.strip() else WRONG


def _math(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
    verdict = _same_math(checked, request, rules)
    return _if_evaluated(verdict, checked, request, rules)


def _math_quickly(
    checked: FormatResult, request: ScoreRequest, rules: RewardRules
) -> Verdict | None:
    verdict = _same_math_quickly(checked, request, rules)
    return None if verdict is None else _if_evaluated(verdict, checked, request, rules)


def _same_math(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
    # An unevaluated answer equals its value here: this compares meanings and pays no reward.
    return math_answer.compute(
        checked.answer, request.answer, accept_missing_unit=rules.reward.accept_missing_unit
    )


def _same_math_quickly(
    checked: FormatResult, request: ScoreRequest, rules: RewardRules
) -> Verdict | None:
    return math_answer.compare_quickly(
        checked.answer,
        request.answer,
        accept_missing_unit=rules.reward.accept_missing_unit,
        problem=request.problem,
    )


def _if_evaluated(
    verdict: Verdict, checked: FormatResult, request: ScoreRequest, rules: RewardRules
) -> Verdict:
    """The verdict; UNEVALUATED for a right answer that does not do the operation asked for."""
    if not verdict.is_correct or checked.answer == request.answer:
        return verdict
    rule = rules.reward.unevaluated
    is_open = is_unevaluated(checked.answer, request.answer, request.problem, rule)
    return UNEVALUATED if is_open else verdict


def _gym(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
    return gym_answer.compare(checked.answer, request.entry)


def _gym_quickly(
    checked: FormatResult, request: ScoreRequest, rules: RewardRules
) -> Verdict | None:
    return gym_answer.compare_quickly(checked.answer, request.answer)


def _code(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
    return grading.grade(
        checked.answer,
        checked.tag,
        parse_tests(request.entry),
        seed=request.seed,
        limits=code_limits(rules.reward),
        counts_all=rules.reward.code_credit == "proportional",
    )


def code_limits(reward: RewardConfig) -> CodeLimits:
    """Limits for grading one program."""
    return CodeLimits(
        cases=reward.tests_per_problem,
        test_s=reward.test_s,
        test_memory_bytes=reward.test_memory_bytes,
        compile_s=reward.compile_s,
        host_patience=reward.host_patience,
        isolation=reward.isolation,
    )


COMPARISONS: dict[str, Comparison] = {
    "math": Comparison(
        any_answer(_math, _math_quickly),
        any_answer_quickly(_math_quickly),
        math_answer.prepare,
        Equivalence(str.strip, _same_math, _same_math_quickly),
    ),
    "exact": Comparison(any_answer(exact_text, exact_text), any_answer_quickly(exact_text)),
    "reasoning_gym": Comparison(
        _gym, _gym_quickly, gym_answer.prepare, Equivalence(_without_spacing)
    ),
    "code": Comparison(_code),
}


@cache
def find_comparison(name: str) -> Comparison:
    """The comparison of a name or `package.module:function`; GradingError for an unknown name.

    A user's function is loaded by `prepare` and `judge`, which run in grading processes alone.
    """
    if name in COMPARISONS:
        return COMPARISONS[name]
    load = cache(partial(load_function, name, key="reward.tasks.*.compare"))
    if ":" not in name:
        load()

    def judge(checked: FormatResult, request: ScoreRequest, rules: RewardRules) -> Verdict:
        is_right = call_function(load(), name, checked.answer, request)
        if not isinstance(is_right, bool):
            raise GradingError(
                f"{name!r} returned {describe_type(is_right)}, expected a bool: whether the answer "
                "is right, as in `return bool(...)`; a share or bonus is a [[reward.extra]]"
            )
        return CORRECT if is_right else WRONG

    return Comparison(
        any_answer(judge, _undecided), prepare=load, equivalence=Equivalence(str, judge)
    )


def call_function(function: Callable[..., object], name: str, *arguments: object) -> object:
    """The result of a user's function, `async` or not; GradingError says what it raised, where.

    A process that the function forks never returns from this call: its value is no verdict.
    """
    try:
        with _end_forked(name):
            result = function(*arguments)
        return asyncio.run(_awaited(result, name)) if inspect.iscoroutine(result) else result
    except (GradingError, MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 a user's function may raise anything
        raise GradingError(
            f"{name!r} raised {type(error).__name__}: {error!s:.200} ({where_raised(error)})"
        ) from error


async def _awaited(result: Coroutine[object, object, object], name: str) -> object:
    # A forked process must not close the event loop, whose epoll it shares with its parent.
    with _end_forked(name):
        return await result


@contextlib.contextmanager
def _end_forked(name: str) -> Iterator[None]:
    """End a process that was forked in the block and would leave it."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            with contextlib.suppress(OSError):
                os.write(2, f"\n{name!r} {FORKED}\n".encode(errors="replace"))
            os._exit(0)


def describe_type(value: object) -> str:
    """Type of a value with its module (numpy has a `bool` too), and the value, cut."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{value!r:.80} of the type {module}{kind.__qualname__}"


def load_function(name: str, *, key: str) -> Callable[..., object]:
    """The function `package.module:function`; GradingError when it is no reward function."""
    try:
        return find_reward(name, key=key)
    except InputError as error:
        raise GradingError(str(error)) from error


def find_reward(name: str, *, key: str) -> Callable[..., object]:
    """The function `package.module:function` of (answer, request). Raises InputError.

    key: of the configuration, in messages.
    """
    function: Callable[..., object] = find_function({}, name, key=key)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # some builtin functions tell none
    try:
        signature.bind("answer", "request")
    except TypeError as error:
        raise InputError(
            f"{key} = {name!r} takes {signature!s:.200}; expected (answer, request): the text that "
            "the format check found, and a ScoreRequest (docs/extending.md)"
        ) from error
    return function
