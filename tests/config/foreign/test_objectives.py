"""An imported objective has the gradient of theirs, or the file says what differs.

Their losses are written here from their definitions, for two completions of 3 and 2 tokens.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import AGGREGATIONS
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.tree import Config
from tests.config.foreign.imported import accounted, imported, written

LENGTHS = [3, 2]
ADVANTAGES = torch.tensor([1.5, 1.5, 1.5, -0.7, -0.7], dtype=torch.float64)
LOGPROBS = torch.tensor([-0.4, -1.2, -2.0, -0.9, -3.1], dtype=torch.float64)
REFERENCE = LOGPROBS + torch.tensor([0.3, -0.6, 0.1, -0.2, 0.8], dtype=torch.float64)
# Beyond every clip range of the tests on both sides; the last ratio, 4.5, reaches the dual clip.
LOG_RATIOS = torch.tensor([0.5, -0.4, 0.02, -0.6, 1.5], dtype=torch.float64)
ON_POLICY = torch.zeros(5, dtype=torch.float64)

VERL = "algorithm: {adv_estimator: grpo}\ndata: {max_response_length: 64}\n"
VERL += "actor_rollout_ref: {rollout: {n: 4}, actor: {%s}}\n"
TRL = "num_generations: 8\nmax_completion_length: 64\nmodel_name_or_path: a/b\n%s"


def here(ours: Config, log_ratios: Tensor) -> Tensor:
    """[tokens] the gradient of our objective."""
    lengths = torch.tensor(LENGTHS)
    [weights] = AGGREGATIONS[ours.algorithm.aggregation.name](
        [lengths.numpy()], ours.algorithm.aggregation
    )
    sequence_of = torch.arange(2).repeat_interleave(lengths)
    logprobs = LOGPROBS.clone().requires_grad_()
    tokens = Tokens(
        logprobs=logprobs, generator_logprobs=LOGPROBS - log_ratios, advantages=ADVANTAGES,
        rewards=ADVANTAGES, weights=torch.from_numpy(weights)[sequence_of],
        is_real=torch.ones(5, dtype=torch.bool), lags=torch.zeros(5, dtype=torch.int64),
        segments=Segments(sequence_of, lengths.cumsum(0), torch.zeros(2, dtype=torch.int64),
                          torch.arange(2), 1, 2),
        is_gold=torch.zeros(5, dtype=torch.bool), reference_logprobs=REFERENCE,
    )  # fmt: skip
    objective = find_objective(ours.algorithm)
    constant = replace(tokens, logprobs=LOGPROBS)
    loss = objective.loss(tokens, objective.advantages(constant), torch.zeros(5)).loss
    [gradient] = torch.autograd.grad(loss, logprobs)
    return gradient


def theirs(loss: Callable[[Tensor, Tensor], Tensor], log_ratios: Tensor) -> Tensor:
    """[tokens] the gradient of a loss of (logprobs, importance ratios)."""
    logprobs = LOGPROBS.clone().requires_grad_()
    ratios = (logprobs - (LOGPROBS - log_ratios)).exp()
    [gradient] = torch.autograd.grad(loss(logprobs, ratios), logprobs)
    return gradient


def clipped(ratios: Tensor, low: float, high: float, dual: float = 100.0) -> Tensor:
    """[tokens] PPO's loss; above -dual * A where A is negative."""
    losses = torch.maximum(-ADVANTAGES * ratios, -ADVANTAGES * ratios.clamp(1 - low, 1 + high))
    return torch.where(ADVANTAGES < 0, losses.minimum(-dual * ADVANTAGES), losses)


def each_mean(values: Tensor) -> Tensor:
    """Mean over completions of the mean over their tokens."""
    return torch.stack([part.mean() for part in values.split(LENGTHS)]).mean()


def of_sequence(ratios: Tensor) -> Tensor:
    """[tokens] the geometric mean of each completion's ratios."""
    return torch.cat([p.log().mean().exp().expand(len(p)) for p in ratios.split(LENGTHS)])


def to_reference(logprobs: Tensor) -> Tensor:
    return logprobs - REFERENCE


POLICY_LOSSES: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "vanilla": (VERL, "clip_ratio: 0.1", lambda _, r: clipped(r, 0.1, 0.1, 3.0).mean()),
    "gspo": (VERL, "policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean, clip_ratio_c: 3.0",
             lambda _, r: each_mean(clipped(of_sequence(r), 0.2, 0.2))),
    "cispo": (VERL, "policy_loss: {loss_mode: cispo}, clip_ratio_low: 10, clip_ratio_high: 0.3",
              lambda lp, r: (-r.detach().clamp(0, 1.3) * ADVANTAGES * lp).mean()),
    "gpg": (VERL, "policy_loss: {loss_mode: gpg}", lambda lp, r: (-ADVANTAGES * lp).mean()),
    "sum": (VERL, "loss_agg_mode: seq-mean-token-sum",
            lambda _, r: clipped(r, 0.2, 0.2, 3.0).sum() / 2),
    "trl cispo": (TRL, "loss_type: cispo\nepsilon_high: 2.0\n",
                  lambda lp, r: (-r.detach().clamp(max=2.0) * ADVANTAGES * lp).mean()),
    "trl delta": (TRL, "loss_type: grpo\nepsilon_high: 0.28\ndelta: 1.5\n",
                  lambda _, r: each_mean(clipped(r, 0.2, 0.28, 1.5))),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_have_the_gradient_of_theirs(tmp_path: Path, name: str) -> None:
    text, given, loss = POLICY_LOSSES[name]
    _, ours = imported(written(tmp_path, "a.yaml", text % given))
    assert ours.algorithm.kl.placement == "none"
    torch.testing.assert_close(here(ours, LOG_RATIOS), theirs(loss, LOG_RATIOS))


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (VERL, "loss_agg_mode: seq-mean-token-sum-norm, grad_clip: 0.5, use_kl_loss: true, "
               "kl_loss_coef: 0.2"),
        (TRL, "loss_type: dr_grpo\nmax_grad_norm: 0.5\nbeta: 0.2\n"),
    ],
)  # fmt: skip
def test_a_divided_loss_is_clipped_at_the_same_gradient(
    tmp_path: Path, text: str, given: str
) -> None:
    found, ours = imported(written(tmp_path, "a.yaml", text % given))

    def loss(logprobs: Tensor, ratios: Tensor) -> Tensor:
        kl = (-to_reference(logprobs)).exp() - 1 + to_reference(logprobs)
        dual = 3.0 if text == VERL else 100.0
        return (clipped(ratios, 0.2, 0.2, dual) + 0.2 * kl).sum() / 2 / 64

    # Both in units of the norm above which gradients are clipped.
    norm = ours.optimizer.clip_grad_norm
    torch.testing.assert_close(here(ours, LOG_RATIOS) / norm, theirs(loss, LOG_RATIOS) / 0.5)
    assert norm == 32
    assert any(line.startswith("optimizer.clip_grad_norm:") for line in found.to_check)


@pytest.mark.parametrize("kind", ["low_var_kl", "k3", "mse", "k2", "low_var_kl+", "k1+", "abs+"])
def test_a_kl_in_the_loss_has_the_gradient_of_verl(tmp_path: Path, kind: str) -> None:
    given = f"use_kl_loss: true, kl_loss_coef: 0.01, kl_loss_type: {kind}"
    found, ours = imported(written(tmp_path, "a.yaml", VERL % given))
    assert ours.algorithm.kl.coefficient == 0.01
    is_k3 = kind in ("low_var_kl", "k3")

    def loss(logprobs: Tensor, ratios: Tensor) -> Tensor:
        # With "+" the gradient is that of the square.
        kl = (
            (-to_reference(logprobs)).exp() - 1 + to_reference(logprobs)
            if is_k3
            else to_reference(logprobs).square() / 2
        )
        return (clipped(ratios, 0.2, 0.2, 3.0) + 0.01 * kl).mean()

    torch.testing.assert_close(here(ours, ON_POLICY), theirs(loss, ON_POLICY))
    assert any(line.startswith("algorithm.kl:") for line in found.to_check) != is_k3


@pytest.mark.parametrize("kind", ["k1", "kl"])
def test_a_kl_that_holds_nothing_in_verl_is_to_check(tmp_path: Path, kind: str) -> None:
    given = f"use_kl_loss: true, kl_loss_coef: 0.01, kl_loss_type: {kind}"
    found, ours = imported(written(tmp_path, "a.yaml", VERL % given))
    kl = ours.algorithm.kl
    assert (kl.placement, kl.estimator, kl.horizon) == ("reward", "k1", "token")
    assert kl.coefficient == 0.01
    [note] = [line for line in found.to_check if line.startswith("algorithm.kl:")]
    assert kind in note and "0 on average" in note


def test_a_kl_in_the_reward_says_what_differs(tmp_path: Path) -> None:
    text = "algorithm: {adv_estimator: ADV, use_kl_in_reward: true, kl_penalty: KIND,\n"
    text += "  kl_ctrl: {type: TYPE, kl_coef: 0.005}}\nactor_rollout_ref: {rollout: {n: 4}}\n"
    cases = {
        ("rloo", "kl", "fixed"): [],
        ("grpo", "k1", "fixed"): ["normalization"],
        ("rloo", "low_var_kl", "fixed"): ["kl_penalty low_var_kl"],
        ("rloo", "kl", "adaptive"): ["target_kl"],
    }
    for (advantages, kind, control), words in cases.items():
        given = text.replace("ADV", advantages).replace("KIND", kind).replace("TYPE", control)
        found, ours = imported(written(tmp_path, "a.yaml", given))
        kl = ours.algorithm.kl
        assert (kl.placement, kl.estimator, kl.coefficient) == ("reward", "k1", 0.005)
        notes = [line for line in found.to_check if line.startswith("algorithm.kl:")]
        assert len(notes) == bool(words)
        assert all(word in notes[0] for word in words)


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        (VERL, "policy_loss: {loss_mode: clip_cov}", "loss_mode = 'clip_cov'.*gspo.*vanilla"),
        (VERL, "policy_loss: {loss_mode: geo_mean}", "'geo_mean'.*nearest, gspo"),
        (VERL, "loss_agg_mode: token-sum", "loss_agg_mode = 'token-sum'.*nearest, token-mean"),
        (VERL, "use_kl_loss: true, kl_loss_type: abs", "kl_loss_type = 'abs'.*low_var_kl"),
        (TRL, "loss_type: sapo", "loss_type = 'sapo'.*dr_grpo.*nearest, dapo"),
        (TRL, "importance_sampling_level: sentence", "'sentence'.*token, sequence"),
        (TRL, "loss_type: cispo", "epsilon_high = 0.2.*above 1"),
    ],
)  # fmt: skip
def test_objectives_that_are_not_here_are_refused(
    tmp_path: Path, text: str, given: str, words: str
) -> None:
    found = accounted(written(tmp_path, "a.yaml", text % given))
    [refused] = found.refused
    assert re.search(words, refused) and found.fault == refused


def test_a_kl_has_a_reference_with_every_preset(tmp_path: Path) -> None:
    cispo = "loss_type: cispo\nepsilon_high: 2.0\nbeta: 0.1\n"
    critic = (VERL % "use_kl_loss: true").replace("grpo", "gae")
    for text in (TRL % cispo, critic):
        _, ours = imported(written(tmp_path, "a.yaml", text))
        assert ours.algorithm.reference.policy == "start"


def test_gspo_of_verl_says_that_kl_and_entropy_have_other_weights(tmp_path: Path) -> None:
    given = "policy_loss: {loss_mode: gspo}, entropy_coeff: 0.001"
    found, ours = imported(written(tmp_path, "a.yaml", VERL % given))
    assert ours.algorithm.aggregation.name == "sequence_mean"
    assert ours.algorithm.policy_loss.dual_clip == 0
    assert any("token-mean is that of KL and entropy" in line for line in found.to_check)


def test_rewards_over_the_batch_of_trl_are_to_check(tmp_path: Path) -> None:
    found, ours = imported(written(tmp_path, "a.yaml", TRL % "scale_rewards: batch\n"))
    assert ours.algorithm.normalization.name == "minibatch"
    [note] = [line for line in found.to_check if line.startswith("algorithm.normalization:")]
    assert "rewards of the generation batch" in note


def test_advantages_over_the_batch_of_verl_are_to_check(tmp_path: Path) -> None:
    text = (VERL % "clip_ratio: 0.2").replace("grpo", "reinforce_plus_plus_baseline")
    found, ours = imported(written(tmp_path, "a.yaml", text))
    assert ours.algorithm.normalization.name == "minibatch"
    assert any("over the tokens of the batch there" in line for line in found.to_check)


def test_a_value_of_the_preset_in_place_of_an_unknown_one_is_to_check(tmp_path: Path) -> None:
    words = (
        "actor_rollout_ref.actor.kl_loss_coef=$COEF",
        "actor_rollout_ref.actor.use_kl_loss=True",
    )
    line = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
    line += f"actor_rollout_ref.rollout.n=4 {' '.join(words)}"
    found, ours = imported(written(tmp_path, "run.sh", line))
    assert ours.algorithm.kl.coefficient == 0.04
    assert "algorithm.kl.coefficient: 0.04 is of the preset; the file does not tell theirs" in (
        found.to_check
    )
