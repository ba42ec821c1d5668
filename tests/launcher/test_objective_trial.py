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

def shaped(tokens, cfg):
    return tokens.advantages - tokens.lags
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)


def tried(**names: str) -> list[str]:
    overrides = [f"algorithm.{part}.name=trial_parts:{name}" for part, name in names.items()]
    return try_objective(load_config(None, overrides).algorithm)


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
        ("advantage_estimator", "of_group", r"shapes \[\(\), \(\)\] .*expected \[\(3,\), \(3,\)\]"),
    ],
)
def test_a_wrong_part_is_refused_with_the_right_shape(part: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{part}\.name='trial_parts:{name}'.*{words}"):
        tried(**{part: name})
