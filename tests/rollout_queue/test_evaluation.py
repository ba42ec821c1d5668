import math

import pytest

from megatron_rl.protocol.config import EvalConfig
from megatron_rl.protocol.process import InputError
from megatron_rl.rollout_queue.evaluation import label_at, select_held_out, summarize
from tests.rollout_queue.makers import make_group, make_prompt


def test_standard_error_of_single_samples_is_the_binomial_one() -> None:
    results = summarize([make_group(n, [float(n < 3)]) for n in range(8)], 2.0)
    assert results["eval/accuracy"] == 3 / 8
    assert results["eval/accuracy_se"] == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 8))
    assert (results["eval/n"], results["eval/seconds"]) == (8, 2.0)


def test_standard_error_of_several_samples_is_over_prompts() -> None:
    results = summarize([make_group(0, [1, 1, 1, 1]), make_group(1, [1, 0, 0, 0])], 1.0)
    # Shares 1 and 1/4: mean 5/8, deviation 3/8 each.
    assert results["eval/accuracy"] == 5 / 8
    assert results["eval/accuracy_se"] == pytest.approx(3 / 8 / math.sqrt(2))
    assert results["eval/n"] == 2 and results["eval/reward"] == 5 / 8


def test_evaluations_are_due_before_in_between_and_after() -> None:
    def labels(version: int, is_final: bool = False, every: int = 5) -> list[str]:
        return label_at(version, is_final=is_final, every_steps=every)

    assert labels(0) == ["before"]
    assert labels(5) == ["step_5"] and labels(6) == [] and labels(5, every=0) == []
    assert labels(10, is_final=True) == ["after"]
    assert labels(0, is_final=True) == ["before", "after"]


def test_too_few_held_out_prompts_are_an_error_that_says_what_to_do() -> None:
    held_out = [make_prompt(str(n), split="held_out") for n in range(3)]
    assert select_held_out(held_out, EvalConfig(prompts=2)) == held_out[:2]
    with pytest.raises(InputError, match="eval.prompts=4, but .* only 3 held-out"):
        select_held_out(held_out, EvalConfig(prompts=4))
