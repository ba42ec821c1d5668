"""Several accepted answers: an answer is right if it equals any of them."""

import msgspec
import pytest

from megatron_rl.config.reward import TaskConfig
from megatron_rl.protocol.types import Score, ScoreRequest
from tests.verification.requests import boxed, make_request, make_rules
from verification.audit import says_number
from verification.draft import Draft
from verification.score import score, screen
from verification.verdict import GradingError

RULES = make_rules()
LABEL = ["\\frac{7}{2}", "3.5"]


def ask(text: str, answers: list[str], **more: str) -> ScoreRequest:
    request = make_request(boxed(text), answer=answers[0], **more)
    return msgspec.structs.replace(request, other_answers=answers[1:])


@pytest.mark.parametrize(
    ("text", "answers", "reason"),
    [
        ("3.5", LABEL, "correct"),
        ("7/2", LABEL, "correct"),
        ("3", LABEL, "wrong_answer"),
        # Only the second, or only the first, decides.
        ("\\sqrt{8}", ["5", "2\\sqrt{2}"], "correct"),
        ("2x+2", ["2(x+1)", "7"], "correct"),
        # Plain text says no to the integer, and leaves the root undecided.
        ("2", ["3", "\\sqrt{4}"], "correct"),
        ("x+1", ["2(x+1)", "\\sqrt{2}"], "wrong_answer"),
        # A refused answer is refused, however many are accepted.
        ("9^{9^{9^{9}}}", ["7", "\\sqrt{2}"], "explosive_answer"),
        ("", ["7", "8"], "empty_box"),
    ],
)
def test_any_accepted_answer_is_right(text: str, answers: list[str], reason: str) -> None:
    assert score(ask(text, answers), RULES).reason == reason
    assert score(ask(text, answers[::-1]), RULES).reason == reason


def test_exact_text_of_any_accepted_answer_is_right() -> None:
    found = [score(ask(t, ["yes", "y"], task="exact"), RULES).reason for t in ("y", "yes", "ye")]
    assert found == ["correct", "correct", "wrong_answer"]


def equals(answer: str, request: ScoreRequest) -> bool:
    return answer == request.answer


def test_a_comparison_of_ones_own_sees_each_accepted_answer() -> None:
    rules = make_rules(tasks={"own": TaskConfig(compare=f"{__name__}:equals")})
    found = [score(ask(t, ["a", "b"], task="own"), rules).reason for t in ("b", "a", "c")]
    assert found == ["correct", "correct", "wrong_answer"]


def as_number(answer: str, request: ScoreRequest) -> int:
    return int(answer == request.answer)


def test_a_comparison_of_ones_own_that_returns_a_number_is_refused() -> None:
    rules = make_rules(tasks={"own": TaskConfig(compare=f"{__name__}:as_number")})
    said = "as_number' returned 1 of the type int, expected a bool"
    with pytest.raises(GradingError, match=said):
        score(ask("a", ["a"], task="own"), rules)


def test_plain_text_decides_about_each_before_a_grading_process() -> None:
    found = screen(ask("7/2", LABEL), RULES)
    assert isinstance(found, Score) and found.is_correct
    # Text says that 3 is neither; a sum of roots needs more.
    assert isinstance(screen(ask("3", LABEL), RULES), Score)
    assert isinstance(screen(ask("2", ["3", "\\sqrt{4}"]), RULES), Draft)


def test_an_answer_that_leaves_the_work_undone_is_refused_against_each() -> None:
    problem = "What is $\\cos 60^\\circ$?"
    answers = ["\\frac{1}{2}", "0.5"]
    assert score(ask("\\cos 60^\\circ", answers, problem=problem), RULES).reason == "unevaluated"
    # An accepted answer that it does not equal hides nothing, wherever it stands.
    for mixed in (["7", "0.5"], ["0.5", "7"]):
        assert score(ask("\\cos 60^\\circ", mixed, problem=problem), RULES).reason == "unevaluated"
    # The set accepts it.
    accepted = [*answers, "\\cos 60^\\circ"]
    assert score(ask("\\cos 60^\\circ", accepted, problem=problem), RULES).reason == "correct"


def test_an_audit_asks_about_each_accepted_answer() -> None:
    assert [says_number(text, ask(text, LABEL)) for text in ("3.5", "7/2", "3")] == [1.0, 1.0, 0.0]
