import itertools
import math

import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import EvalConfig, QueueConfig
from megatron_rl.protocol.types import Sampling, ScoreRequest, VerifierReady
from megatron_rl.rollout_queue.evaluation import (
    AUTO_PROMPTS,
    EvaluationSet,
    describe_evaluation,
    label_at,
    select_held_out,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.running_evaluation import Evaluation, problem_of, summarize
from megatron_rl.rollout_queue.scoring import Scoring
from tests.rollout_queue.makers import make_group, make_prompt, make_rollout


def summarized(groups: list[Group], seconds: float) -> dict[str, float]:
    return summarize([problem_of(group) for group in groups], seconds)


def test_standard_error_of_single_samples_is_the_binomial_one() -> None:
    results = summarized([make_group(n, [float(n < 3)]) for n in range(8)], 2.0)
    assert results["eval/accuracy"] == 3 / 8
    assert results["eval/accuracy_se"] == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 7))
    assert (results["eval/n"], results["eval/seconds"]) == (8, 2.0)


def test_standard_error_of_several_samples_is_over_prompts() -> None:
    results = summarized([make_group(0, [1, 1, 1, 1]), make_group(1, [1, 0, 0, 0])], 1.0)
    # Shares 1 and 1/4: mean 5/8, deviation 3/8 each, variance 2 * (3/8)^2 / (2 - 1).
    assert results["eval/accuracy"] == 5 / 8
    assert results["eval/accuracy_se"] == pytest.approx(3 / 8)
    assert results["eval/n"] == 2 and results["eval/reward"] == 5 / 8


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    rewards = [[1, 0, 0, 1, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 1], [1, 1, 0, 1, 1, 1]]
    results = summarized([make_group(n, mine) for n, mine in enumerate(rewards)], 1.0)
    for k in (2, 4, 6):
        shares = [
            np.mean([any(subset) for subset in itertools.combinations(mine, k)]) for mine in rewards
        ]
        assert results[f"eval/pass_at_{k}"] == pytest.approx(np.mean(shares))
        mean = sum(shares) / 4
        error = math.sqrt(sum((share - mean) ** 2 for share in shares) / 3 / 4)
        assert results[f"eval/pass_at_{k}_se"] == pytest.approx(error)
    assert not {"eval/pass_at_1", "eval/pass_at_3", "eval/pass_at_5"} & results.keys()
    # One completion could not be graded: too few for k = 6, enough for k = 4.
    shorter = summarized([make_group(0, [1] + [0] * 4), make_group(1, [0] * 6)], 1.0)
    assert shorter["eval/pass_at_6"] == 0 and shorter["eval/pass_at_4"] == pytest.approx(4 / 5 / 2)
    single = summarized([make_group(0, [1.0])], 1.0)
    assert not any(name.startswith("eval/pass_at") for name in single)


def test_one_prompt_has_no_standard_error() -> None:
    results = summarized([make_group(0, [1, 0, 0, 0])], 1.0)
    assert (results["eval/accuracy"], results["eval/pass_at_2"]) == (0.25, 0.5)
    assert not [name for name in results if name.endswith("_se")]


def test_evaluations_are_due_before_in_between_and_after() -> None:
    def labels(version: int, is_final: bool = False, every: int = 5) -> list[str]:
        return label_at(version, is_final=is_final, every_steps=every)

    assert labels(0) == ["before"]
    assert labels(5) == ["step_5"] and labels(6) == [] and labels(5, every=0) == []
    assert labels(10, is_final=True) == ["after"]
    # Every 5 of 12 steps: the last version is evaluated too.
    due = [(version, labels(version, is_final=version == 12)) for version in range(13)]
    assert [one for one in due if one[1]] == [
        (0, ["before"]), (5, ["step_5"]), (10, ["step_10"]), (12, ["after"]),
    ]  # fmt: skip
    assert labels(0, is_final=True) == ["before", "after"]


def test_too_few_held_out_prompts_are_an_error_that_says_what_to_do() -> None:
    held_out = [make_prompt(str(n), split="held_out") for n in range(3)]
    assert select_held_out(held_out, EvalConfig(prompts=2)) == held_out[:2]
    with pytest.raises(InputError, match="eval.prompts=4, but .* only 3 held-out"):
        select_held_out(held_out, EvalConfig(prompts=4))


def requests_of_an_evaluation(label: str, first_number: int) -> dict[str, ScoreRequest]:
    """What verifiers are asked about each prompt, in an evaluation whose groups begin there."""
    prompts = [make_prompt(name, task="code") for name in ("a", "b", "c")]
    what = EvaluationSet("", prompts, 1, Sampling(16, 0.0))
    evaluation = Evaluation(label, what, version=0, now=0.0, done={})
    scoring = Scoring(QueueConfig(), RewardConfig())
    scoring.announce("v", VerifierReady({"code": 9}, session=1), 0.0)
    for prompt in prompts:
        group = evaluation.open_group(first_number)
        assert (group.number, group.prompt) == (first_number, prompt)
        first_number += 1
        scoring.submit(group, make_rollout())
    asked = [scoring.next_request(0.0) for _ in prompts]
    return dict(zip(("a", "b", "c"), (request for _, request in asked), strict=True))


def test_every_evaluation_draws_the_same_tests_for_a_prompt() -> None:
    before = requests_of_an_evaluation("before", 0)
    after = requests_of_an_evaluation("after", 1234)
    seeds = [request.seed for request in before.values()]
    assert [request.seed for request in after.values()] == seeds
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    # The first 31 bits of the question's SHA-256, by `printf 'question a' | sha256sum`.
    assert seeds[0] == 0xAE425D11 >> 1


def test_automatic_size_takes_what_there_is_up_to_a_limit() -> None:
    many = [make_prompt(str(n), split="held_out") for n in range(AUTO_PROMPTS + 5)]
    assert select_held_out(many[:3], EvalConfig()) == many[:3]
    assert select_held_out(many, EvalConfig()) == many[:256]
    assert select_held_out([], EvalConfig(prompts=0)) == []
    with pytest.raises(InputError, match="eval.prompts=auto, but .* only 0 held-out"):
        select_held_out([], EvalConfig())


def test_it_is_said_what_is_evaluated_on_and_that_a_handful_tells_nothing() -> None:
    def said(count: int, name: str = "") -> list[str]:
        prompts = [make_prompt(str(n)) for n in range(count)]
        return describe_evaluation([EvaluationSet(name, prompts, 4, Sampling(16, 1.0))])

    assert said(30) == ["evaluated on: 30 held-out prompts (4 completions each, temperature 1)"]
    line, warning = said(4, "aime")
    assert "4 of the set aime prompts" not in line and "4 prompts of the set aime" in line
    # 0.5 / sqrt(4); three standard errors of a difference: 3 sqrt(2) 0.25.
    assert "up to 0.25," in warning and "gain of 1.06 would be 3 combined" in warning
    line, warning = said(1)
    assert "1 held-out prompt (4 completions" in line and "too few, 1 held-out prompt:" in warning
