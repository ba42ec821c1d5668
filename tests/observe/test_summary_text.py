"""The text of a summary: every evaluation in order, and true numbers of steps."""

from typing import Any

import pytest

from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.observe.summary_text import render_text
from tests.observe.test_summary import FACTS, PASS_AT_4, eval_row, run_rows, step_row


def test_every_evaluation_is_listed_in_order_with_its_change() -> None:
    rows = [eval_row("before", 100.0, 0.25), eval_row("step_5", 101.0, 0.75),
            eval_row("after", 102.0, 0.5)]  # fmt: skip
    summary = summarize(rows, RunFacts(eval_temperature=1.0))
    assert summary["evaluations"] == {
        "before": {"accuracy": 0.25, "se": 0.03, "n": 256},
        "step_5": {"accuracy": 0.75, "se": 0.03, "n": 256},
        "after": {"accuracy": 0.5, "se": 0.03, "n": 256},
    }
    # 0.5 / (0.03 * sqrt(2)) = 11.8
    assert render_text(summary, RunFacts(eval_temperature=1.0)).splitlines()[:4] == [
        "Accuracy on 256 held-out prompts (sampled, T=1), with its standard error",
        "  before RL         0.250 +- 0.030",
        "  step_5            0.750 +- 0.030   +0.500 to before, +11.8 combined standard errors",
        "  after RL          0.500 +- 0.030   +0.250 to before, +5.9 combined standard errors",
    ]


def test_an_evaluation_of_a_model_alone_has_its_accuracy_and_votes() -> None:
    row = eval_row("final", 100.0, 0.75) | PASS_AT_4 | {"eval/n": 60, "eval/not_graded": 2}
    lines = render_text(summarize([row], RunFacts()), RunFacts()).splitlines()
    assert lines[0].startswith("Accuracy on 60 held-out prompts (greedy)")
    assert "2 completions could not be graded" in lines[0]
    assert lines[1:3] == [
        "  final             0.750 +- 0.030",
        "  final             pass@2 0.600 +- 0.020, pass@4 0.750 +- 0.030",
    ]


@pytest.mark.parametrize(
    ("accuracy", "further", "is_shown"),
    [
        # No answer is right, so accuracies say nothing.
        (0.0, [], True),
        (0.25, [], False),
        # A judge grades: what it rather rejects differs, too.
        (0.25, [{"source": "queue", "activity/seconds": 5.0, "activity/reason/graded": 3}], True),
        (0.25, [step_row(1, 102.0, environment__turns=1.0, environment__given_tokens=0.0,
                         environment__wait_s=0.0)], True),
    ],
)  # fmt: skip
def test_the_mean_reward_stands_beside_accuracies_that_say_little(
    accuracy: float, further: list[dict[str, Any]], is_shown: bool
) -> None:
    rows = [eval_row("before", 100.0, accuracy) | {"eval/reward": 0.375}, *further,
            eval_row("after", 103.0, accuracy, step=1) | {"eval/reward": 0.5},
            eval_row("after.aime", 104.0, accuracy, step=1) | {"eval/reward": 0.625}]  # fmt: skip
    summary = summarize(rows, RunFacts())
    assert [found["reward"] for found in summary["evaluations"].values()] == [0.375, 0.5]
    lines = render_text(summary, RunFacts()).splitlines()[1:4]
    for line, reward in zip(lines, ("0.375", "0.500", "0.625"), strict=True):
        assert (f", mean reward {reward}" in line) == is_shown == ("reward" in line)


def test_a_summary_of_an_earlier_release_has_its_accuracies() -> None:
    summary = summarize(run_rows(), FACTS)
    text = render_text(summary, FACTS)
    del summary["evaluations"]
    assert render_text(summary, FACTS) == text and "after RL          0.500" in text


def test_an_extended_run_has_no_figures_of_its_earlier_end() -> None:
    """It ended after step 3 with 0.5, its SFT baseline with 0.31, and then trained to step 5."""
    ended = [*run_rows(), eval_row("after.aime", 131.0, 0.2, step=3)]
    # The trainer may write the last step after the evaluation that follows it.
    last = next(row for row in ended if row["step"] == 3)
    late = summarize([*(row for row in ended if row is not last), last], FACTS)
    assert late["accuracy_after"] == 0.5
    extended = [*ended, step_row(4, 140.0), step_row(5, 141.0)]
    lost = eval_row("after", 142.0, 0.0, step=5)
    del lost["eval/accuracy"], lost["eval/accuracy_se"]
    for rows in (extended, [*extended, lost]):
        summary = summarize(rows, FACTS)
        assert summary["steps"] == 5
        for key in ("accuracy_after", "sft_baseline_accuracy", "rl_minus_sft_baseline"):
            assert summary[key] is None
        assert [*summary["evaluations"], *summary["evaluation_sets"]] == ["before"]
        assert "after RL" not in render_text(summary, FACTS)
    again = [eval_row("after", 143.0, 0.75, step=5), eval_row("sft_baseline", 150.0, 0.5)]
    assert summarize([*extended, *again], FACTS)["rl_minus_sft_baseline"] == 0.25


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (1, "the only step 1.000"),
        (8, "all 8 steps 4.500"),
        (10, "all 10 steps 5.500"),
        # 1 to 10, and 3 to 12.
        (12, "first 10 steps 5.500, last 10 steps 7.500"),
    ],
)
def test_mean_rewards_name_the_number_of_steps(steps: int, text: str) -> None:
    rows = [step_row(i, 100.0 + i, **{"rollout/reward": float(i)}) for i in range(1, steps + 1)]
    lines = render_text(summarize(rows, RunFacts()), RunFacts()).splitlines()
    assert f"Mean reward         {text}" in lines
