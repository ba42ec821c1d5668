import math

import msgspec
import pytest

from megatron_rl.config.reward import ExtraReward, TaskConfig
from megatron_rl.protocol import frames
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.types import Score, ScoreDone, ScoreRequest
from tests.verification.requests import RULES, boxed, make_request, make_rules
from verification.draft import Draft
from verification.rules import RewardRules
from verification.score import length_penalty, prepare, score, screen, unverified
from verification.verdict import GradingError

PLUG_INS = "tests.verification.pool.hostile_tasks"


def pools_left(request: ScoreRequest, rules: RewardRules) -> list[str]:
    """Worker pools that a request has to pass after its format check and the quick comparison."""
    found = screen(request, rules)
    return [step.pool for step in found.steps] if isinstance(found, Draft) else []


@pytest.mark.parametrize(
    ("n_tokens", "penalty"),
    # Limit 100, margin 40: free up to 60, then 0.1 / 40 = 0.0025 a token.
    [(0, 0.0), (60, 0.0), (61, -0.0025), (70, -0.025), (80, -0.05), (100, -0.1), (500, -0.1)],
)
def test_length_penalty_follows_the_paper(n_tokens: int, penalty: float) -> None:
    assert math.isclose(length_penalty(n_tokens, 100, 40), penalty, abs_tol=1e-12)


def test_length_penalty_without_margin_is_nothing() -> None:
    assert length_penalty(100, 100, 0) == 0.0
    assert length_penalty(101, 100, 0) == 0.0


def test_a_request_may_bring_its_own_length_rule() -> None:
    # 30 tokens of a margin of 50 beyond 150; the configured rule, with its limit of 100, has no
    # margin.
    request = make_request(boxed("7"), completion_tokens=180)
    staged = msgspec.structs.replace(request, length_rule=LengthRule(200, 50, 0.2))
    assert score(request, RULES).parts["length"] == 0.0
    assert math.isclose(score(staged, RULES).parts["length"], -0.2 * 30 / 50)


def test_right_answer_gets_both_rewards() -> None:
    found = score(make_request(boxed("\\frac{14}{2}")), RULES)
    assert found.parts == {"format": 0.1, "correct": 0.9, "length": 0.0}
    assert math.isclose(found.reward, 1.0)
    assert found.is_correct
    assert found.is_well_formed


def test_wrong_answer_keeps_the_format_reward() -> None:
    found = score(make_request(boxed("8")), RULES)
    assert found.parts == {"format": 0.1, "correct": 0.0, "length": 0.0}
    assert found.reward == 0.1
    assert found.reason == "wrong_answer"
    assert not found.is_correct


def test_refused_format_gets_nothing_and_is_not_graded() -> None:
    rules = make_rules(length_margin_tokens=50)
    found = score(make_request("The answer is \\boxed{7}", completion_tokens=100), rules)
    assert found.reward == 0.0
    assert found.parts == {"format": 0.0, "correct": 0.0, "length": 0.0}
    assert found.reason == "no_think_start"
    assert not found.is_well_formed


def test_length_is_taken_from_right_and_wrong_answers() -> None:
    rules = make_rules(length_margin_tokens=40)
    right = score(make_request(boxed("7"), completion_tokens=80), rules)
    wrong = score(make_request(boxed("8"), completion_tokens=100), rules)
    assert math.isclose(right.reward, 0.95)
    assert math.isclose(wrong.reward, 0.0, abs_tol=1e-12)
    assert wrong.is_well_formed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<think>still thinking", "unfinished"),
        ("<think>a</think>The answer", "unfinished"),
        ("<think>a</think>\\boxed{\\frac{1", "unfinished"),
        ("<think>\\boxed{7}</think>so", "unfinished"),
        ("Hello", "no_think_start"),
        ("<think><think>", "several_think_tags"),
    ],
)
def test_completion_cut_at_the_limit_is_unfinished(text: str, reason: str) -> None:
    assert score(make_request(text, is_finished=False), RULES).reason == reason


def test_answer_before_the_cut_counts() -> None:
    assert score(make_request(boxed("7") + " And", is_finished=False), RULES).is_correct


@pytest.mark.parametrize(
    ("box", "answer", "is_correct"),
    [("cat", "cat", True), (" cat ", "cat\n", True), ("Cat", "cat", False), ("7.0", "7", False)],
)
def test_exact_compares_characters(box: str, answer: str, is_correct: bool) -> None:
    request = make_request(boxed(box), task="exact", answer=answer)
    assert score(request, RULES).is_correct is is_correct
    assert isinstance(screen(request, RULES), Score)


def test_quick_score_leaves_open_what_needs_a_library() -> None:
    request = make_request(boxed("7"))
    assert isinstance(screen(request, RULES), Score)
    product = make_request(boxed("(x+1)(x-1)"), answer="x^2-1")
    assert pools_left(product, RULES) == ["answers"]
    assert score(product, RULES).is_correct


def test_unverified_answer_keeps_the_format_reward() -> None:
    rules = make_rules(length_margin_tokens=40, language=0.1)
    request = make_request(boxed("7"), completion_tokens=80)
    judged = screen(request, rules)
    # The right answer is known, but the language could not be told within its limits.
    assert isinstance(judged, Draft) and judged.found.parts["correct"] == 0.9
    found = unverified(judged, rules, "grading_timeout")
    assert found.parts == {"format": 0.1, "correct": 0.0, "length": -0.05}
    assert (found.reward, found.reason) == (0.05, "grading_timeout")


@pytest.mark.parametrize("name", ["maths", "", "tests.verification.pool.hostile_tasks:obey"])
def test_unknown_task_names_the_known_ones(name: str) -> None:
    for judge in (score, screen):
        with pytest.raises(GradingError, match="known are math, exact, reasoning_gym, code"):
            judge(make_request("", task=name), RULES)


@pytest.mark.parametrize("function", ["no.such.module:f", f"{PLUG_INS}:no_such_function"])
def test_function_that_cannot_be_loaded_is_our_failure(function: str) -> None:
    rules = make_rules(tasks={"mine": TaskConfig(compare=function)})
    request = make_request(boxed("7"), task="mine")
    assert pools_left(request, rules) == ["custom"]
    with pytest.raises(GradingError, match="no_such|no.such"):
        score(request, rules)
    with pytest.raises(GradingError, match="no_such|no.such"):
        prepare("judge", "mine", rules)
    rules = make_rules(extra=[ExtraReward(name="bonus", function=function)])
    assert pools_left(make_request(boxed("7")), rules) == ["custom"]
    with pytest.raises(GradingError, match="no_such|no.such"):
        prepare("extras", "math", rules)


def test_task_of_the_user_has_its_format_check_and_comparison() -> None:
    rules = make_rules(
        tasks={
            "mine": TaskConfig(format_check="box", compare=f"{PLUG_INS}:obey"),
            "any_text": TaskConfig(format_check="none", compare="exact"),
        }
    )
    assert score(make_request("so \\boxed{7}", task="mine"), rules).is_correct
    assert not score(make_request("so \\boxed{8}", task="mine"), rules).is_correct
    assert score(make_request("so 7", task="mine"), rules).reason == "no_boxed"
    assert pools_left(make_request("so \\boxed{7}", task="mine"), rules) == ["custom"]
    assert score(make_request(" 7\n", task="any_text"), rules).is_correct
    assert score(make_request(" \n", task="any_text"), rules).reason == "empty_response"


def test_extra_rewards_are_added_by_weight_and_recorded_by_name() -> None:
    half = ExtraReward(name="half", function=f"{PLUG_INS}:half", weight=0.2)
    other = ExtraReward(name="other", function=f"{PLUG_INS}:half", weight=5, tasks=["exact"])
    rules = make_rules(extra=[half, other])
    request = make_request(boxed("7"))
    # "7" has one of two characters: 0.1 + 0.9 + 0.2 / 2.
    found = score(request, rules)
    assert math.isclose(found.reward, 1.1)
    assert found.parts == {"format": 0.1, "correct": 0.9, "length": 0.0, "half": 0.1}
    assert pools_left(request, rules) == ["custom"]
    assert "half" not in score(make_request("7"), rules).parts


def test_functions_of_the_user_may_be_async() -> None:
    mine = TaskConfig(format_check="box", compare=f"{PLUG_INS}:sleep_and_compare")
    late = ExtraReward(name="late", function=f"{PLUG_INS}:half_later", weight=0.2)
    rules = make_rules(tasks={"mine": mine}, extra=[late])
    right, wrong = (score(make_request(f"\\boxed{{{n}}}", task="mine"), rules) for n in (7, 8))
    assert (right.reason, wrong.reason) == ("correct", "wrong_answer")
    # "7" has one of two characters.
    assert math.isclose(right.parts["late"], 0.2 / 2)


def test_extra_reward_that_is_no_number_is_our_failure() -> None:
    rules = make_rules(extra=[ExtraReward(name="bad", function=f"{PLUG_INS}:not_a_number")])
    with pytest.raises(GradingError, match="returned nan of the type float, expected one finite"):
        score(make_request(boxed("7")), rules)


@pytest.mark.parametrize(("weight", "is_fit"), [(1.0, True), (1.01, False), (-1e30, False)])
def test_extra_reward_that_no_message_could_carry_is_our_failure(
    weight: float, is_fit: bool
) -> None:
    big = ExtraReward(name="big", function=f"{PLUG_INS}:astronomic", weight=weight)
    rules = make_rules(extra=[big])
    if is_fit:
        done = ScoreDone(1, score(make_request(boxed("7")), rules))
        assert frames.decode(frames.encode(done)).score.parts["big"] == 1e24
        return
    with pytest.raises(GradingError, match=r"returned 1e\+24 of the type float.* from -\S+ to \d"):
        score(make_request(boxed("7")), rules)


def test_what_a_reward_raises_is_said_with_file_and_line() -> None:
    rules = make_rules(extra=[ExtraReward(name="bad", function=f"{PLUG_INS}:raising")])
    with pytest.raises(
        GradingError, match=r"raised KeyError: '7' \(.*hostile_tasks.py, line \d+, in"
    ):
        score(make_request(boxed("7")), rules)


FRENCH = "Combien font la somme de trois et de quatre, et pourquoi cette somme est-elle impaire ?"
THOUGHTS = {
    "fr": "Je commence par ajouter trois et quatre, puis je vérifie que le résultat est impair.",
    "en": "First we add three and four, and then we check that the result is an odd number.",
}


@pytest.mark.parametrize(("thoughts", "target", "earned"), [
    ("fr", "", 0.1), ("en", "", 0.0), ("en", "en", 0.1), ("fr", "en", 0.0),
])  # fmt: skip
def test_language_is_that_of_the_problem_or_the_target(
    thoughts: str, target: str, earned: float
) -> None:
    rules = make_rules(language=0.1)
    text = f"<think>{THOUGHTS[thoughts]}</think>\\boxed{{7}}"
    request = make_request(text, problem=FRENCH, language=target)
    assert pools_left(request, rules) == ["language"]
    found = score(request, rules)
    assert found.parts["language"] == earned
    assert math.isclose(found.reward, 1.0 + earned)


def test_wrong_answer_in_the_right_language_earns_the_language_part() -> None:
    text = f"<think>{THOUGHTS['fr']}</think>\\boxed{{8}}"
    found = score(make_request(text, problem=FRENCH), make_rules(language=0.1))
    assert math.isclose(found.reward, 0.2) and not found.is_correct


@pytest.mark.parametrize(
    ("text", "tail", "form", "earned"),
    [
        (f"{FRENCH} \\boxed{{7}}", "", "box", 0.1),
        ("Three plus four equals seven, which is an odd number. \\boxed{7}", "", "box", 0.0),
        ("\\boxed{7}", "", "box", 0.0),
        (f"{FRENCH} \\boxed{{7}}", "<think>\n\n</think>\n\n", "think_box", 0.1),
        (f"<think>\n</think>{FRENCH} \\boxed{{7}}", "", "think_box", 0.0),
    ],
)
def test_an_answer_alone_earns_the_language_part_where_the_form_has_no_thoughts(
    text: str, tail: str, form: str, earned: float
) -> None:
    rules = make_rules(language=0.1, tasks={"math": {"compare": "math", "format_check": form}})
    found = score(make_request(text, problem=FRENCH, prompt_tail=tail), rules)
    assert found.is_correct
    assert found.parts["language"] == earned
