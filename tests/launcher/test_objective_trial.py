"""A user's loss, advantage or correction with the habits of other systems is refused in words."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.launcher.objective_trial import try_objective

PARTS = """
import numpy as np
from megatron_rl.algorithms.policy_loss import PolicyLoss, importance_ratios

def right(tokens, advantages, cfg):
    values = importance_ratios(tokens, cfg) * advantages
    return PolicyLoss(values, {"kept": (values * tokens.is_real).sum()})

def scalar(tokens, advantages, cfg):
    return PolicyLoss((importance_ratios(tokens, cfg) * advantages).mean(), {})

def plain(tokens, advantages, cfg):
    return importance_ratios(tokens, cfg) * advantages

def detached(tokens, advantages, cfg):
    return PolicyLoss(tokens.logprobs.detach() * advantages, {})

def of_items(tokens, advantages, cfg):
    return PolicyLoss(tokens.logprobs * advantages, {"share": 0.5})

def broken(tokens, advantages, cfg):
    return PolicyLoss(tokens.log_probs * advantages, {})

def renamed(tokens, advantages, cfg):
    return PolicyLoss(tokens.logprobs * advantages, {"grad_norm": tokens.is_real.sum()})

def capped(ratios, cfg):
    return ratios.clamp(max=2.0)

def one_factor(ratios, cfg):
    return ratios.mean()

def by_rank(group, cfg):
    return group.rewards.argsort().argsort() - 1.0

def of_group(group, cfg):
    return group.rewards.mean()

def divided(group, cfg):
    centred = group.rewards - group.rewards.mean()
    return centred / centred.std()

def of_three(group, cfg):
    return group.rewards if len(group.rewards) == 3 else group.rewards * np.nan

def of_some(group, cfg):
    return group.rewards if len(group.rewards) > 5 else group.rewards * np.inf

def joined(advantages, cfg):
    return np.concatenate(advantages)

def scaled(advantages, cfg):
    return [mine / mine.std() for mine in advantages]

def shaped(tokens, cfg):
    return tokens.advantages - tokens.lags
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)


def tried(*more: str, **names: str) -> list[str]:
    overrides = [f"algorithm.{part}.name=trial_parts:{name}" for part, name in names.items()]
    return try_objective(load_config(None, [*overrides, *more]))


def test_right_parts_are_called_and_named_and_ours_are_not() -> None:
    found = tried(
        policy_loss="right", correction="capped", advantage_estimator="by_rank", shaping="shaped"
    )
    assert [line.partition("=")[0] for line in found] == [
        "algorithm.advantage_estimator.name", "algorithm.shaping.name",
        "algorithm.correction.name", "algorithm.policy_loss.name",
    ]  # fmt: skip
    assert tried() == []


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        # The habit from TRL and verl: the mean of a batch, or a tensor without what to report.
        ("policy_loss", "scalar", r"gives \[\] for 17 tokens, expected a tensor \[tokens\]"),
        ("policy_loss", "plain", r"returns a plain tensor, expected PolicyLoss\(values, sums\)"),
        ("policy_loss", "detached", "no finite gradient by tokens.logprobs"),
        ("policy_loss", "renamed", r"sums\['grad_norm'\] would be mixed with our own figure"),
        ("policy_loss", "of_items", r"sums\['share'\] is no tensor of shape \[\]"),
        (
            "policy_loss",
            "broken",
            r"AttributeError: .*log_probs.* \(.*trial_parts\.py, line 22, in ",
        ),
        ("correction", "one_factor", r"gives \[\] for 17 tokens, .*without a sum or mean"),
        ("advantage_estimator", "of_group", r"gives the shape \(\) .*expected 16 finite numbers"),
        # Groups have train.group_size completions, 16, or 15 where a completion was lost.
        ("advantage_estimator", "of_three", r"gives nan for completion 0 of .*'made-up-0', whose"),
        ("normalization", "joined", r"gives 31 arrays for 2 groups"),
    ],
)
def test_a_wrong_part_is_refused_with_the_right_shape(part: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{part}\.name='trial_parts:{name}'.*{words}"):
        tried(**{part: name})


def test_a_group_of_equal_rewards_is_tried_where_it_may_reach_the_function() -> None:
    assert len(tried(advantage_estimator="divided")) == 1
    keep = "algorithm.zero_variance_groups=keep"
    words = r"divided' gives nan for completion 0 of the prompt 'made-up-equal', .*\[0.0, 0.0"
    with pytest.raises(InputError, match=words):
        tried(keep, advantage_estimator="divided")
    with pytest.raises(InputError, match=r"scaled' gives nan .* a group whose advantages are \[0"):
        tried(keep, normalization="scaled")
    # Whether an environment rewards replies is not known before it runs.
    environment = 'reward.tasks.calculate.environment="calculate:Calculate"'
    found = tried(environment, advantage_estimator="divided")
    assert found[1].startswith("warning: where an environment rewards replies one by one, ")
    assert "made-up-equal" in found[1] and len(found) == 2


def test_groups_of_the_sizes_that_the_run_makes_are_tried() -> None:
    whole = "expert.queue.min_group_share=1"
    assert tried("train.group_size=6", whole, advantage_estimator="of_some")
    with pytest.raises(InputError, match="gives inf for completion 0 .* expected 5 finite"):
        tried("train.group_size=6", advantage_estimator="of_some")
