"""megatron-rl audit --model: how completions are graded, and how far apart two measurements of one
model may be."""

import pytest

from megatron_rl.config.tree import Config
from megatron_rl.launcher.audit_model import compare_accuracy, share_correct, tolerance
from megatron_rl.launcher.reward_trial import sample_of
from megatron_rl.protocol.types import Prompt
from tests.rollout_queue.makers import make_prompt


def test_two_sampled_accuracies_may_differ_by_three_errors_of_their_difference() -> None:
    # One error is sqrt(0.8 * 0.2 / 400) = 0.02, that of the difference 0.0283.
    assert tolerance(0.8, 400, is_sampled=True) == pytest.approx(0.0849, abs=1e-4)


def test_greedy_accuracies_differ_by_rounding_alone() -> None:
    assert tolerance(0.8, 400, is_sampled=False) == pytest.approx(0.04)
    # All right or all wrong leaves room for an answer that rounding turns.
    assert tolerance(1.0, 400, is_sampled=False) == pytest.approx(0.001)


TAGS = {"open": "<think>", "close": "</think>"}


@pytest.mark.parametrize(
    ("thinking", "check", "tail", "texts", "share"),
    [
        # A model that does not think.
        ("none", "box", "", [r"It is \boxed{7}", r"\boxed{\frac{14}{2}}", r"\boxed{8}", "7"], 0.5),
        # The prompt opens the thoughts.
        (TAGS, "think_box", "<think>\n", [r"a</think> \boxed{7}", r"a \boxed{7}"], 0.5),
        (TAGS, "think_box", "", [r"<think>a</think> \boxed{7}", r"a</think> \boxed{7}"], 0.5),
    ],
    ids=["no thoughts", "opened by the prompt", "opened by the model"],
)
def test_answers_are_graded_by_the_rules_of_the_run(
    thinking: object, check: str, tail: str, texts: list[str], share: float
) -> None:
    config = Config.model_validate(
        {"render": {"thinking": thinking}, "verifier": {"answers": {"workers": 1}},
         "reward": {"tasks": {"math": {"format_check": check, "compare": "math"}}}}
    )  # fmt: skip
    prompt = Prompt("p", "math", make_prompt("p").messages, "7")
    samples = [sample_of(prompt, text, tail) for text in texts]
    assert share_correct(config, samples) == share


def test_a_run_that_measured_no_accuracy_has_none_to_compare() -> None:
    config = Config.model_validate({})
    # Neither the renderer nor the model is asked.
    found = compare_accuracy(config, None, [], {"accuracy_after": None})
    assert [*found] == ["accuracy_not_compared"]
