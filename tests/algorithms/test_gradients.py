"""Every estimator's mean, by listing all outcomes, against the exact gradient of its objective."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.trainer.value_head import ValueHead
from tests.algorithms.tabular import (
    BANDIT,
    LIMIT,
    PAIRS,
    SUMMED,
    Table,
    expected_gradient,
    gradient,
    token_scores,
)

TABLES = pytest.mark.parametrize("table", [BANDIT, PAIRS], ids=["bandit", "pairs"])


def scores(table: Table, logits: Tensor) -> Tensor:
    """[outcomes, logits]: gradient of each outcome's logprob."""
    jacobian = torch.autograd.functional.jacobian(lambda x: table.logprobs(x).sum(1), logits)
    return jacobian


def rewards(table: Table) -> Tensor:
    return torch.tensor(table.rewards, dtype=torch.float64)


# --- advantage estimator
# ------------------------------------------------------------------------------------


@TABLES
@pytest.mark.parametrize("preset", ["rloo", "reinforce"])
def test_rloo_and_reinforce_follow_the_mean_reward(table: Table, preset: str) -> None:
    logits = table.logits(0)
    found = expected_gradient(table, {"preset": preset}, logits, group_size=3)
    torch.testing.assert_close(found, gradient(table.mean_reward, logits), **LIMIT)


@TABLES
def test_the_group_mean_is_short_by_one_nth(table: Table) -> None:
    logits = table.logits(0)
    given = SUMMED | {"policy_loss": {"name": "reinforce"}}
    for n in (2, 3):
        found = expected_gradient(table, given, logits, group_size=n)
        exact = gradient(table.mean_reward, logits) * (n - 1) / n
        torch.testing.assert_close(found, exact, **LIMIT)


@TABLES
def test_dr_grpo_follows_the_mean_reward_but_for_a_constant(table: Table) -> None:
    logits = table.logits(0)
    found = expected_gradient(table, {"preset": "dr_grpo"}, logits, group_size=3)
    torch.testing.assert_close(found, gradient(table.mean_reward, logits) * 2 / 3, **LIMIT)


@pytest.mark.parametrize(
    ("table", "n", "k"), [(BANDIT, 4, 2), (BANDIT, 4, 3), (BANDIT, 4, 4), (PAIRS, 3, 2)]
)
def test_pass_at_k_follows_the_mean_best_of_k(table: Table, n: int, k: int) -> None:
    logits = table.logits(1)

    def best_of_k(leaf: Tensor) -> Tensor:
        chances, r = table.probabilities(leaf), rewards(table)
        return sum(
            chances[list(places)].prod() * r[list(places)].max()
            for places in product(range(len(r)), repeat=k)
        )

    given = {"preset": "pass_at_k", "advantage_estimator": {"k": k}}
    found = expected_gradient(table, given, logits, group_size=n)
    # The mean over the sequences of a group, where the sum over them is the estimator.
    torch.testing.assert_close(found, gradient(best_of_k, logits) / n, **LIMIT)


# --- corrections -------------------------------------------------------------------------------


def corrected(high: float, **more: Any) -> dict[str, Any]:
    correction = {"name": "truncated", "high": high, **more}
    advantage_estimator = {"name": "leave_one_out"}
    return SUMMED | {
        "preset": "aipo",
        "correction": correction,
        "advantage_estimator": advantage_estimator,
    }


def test_aipo_below_its_cap_follows_the_mean_reward_of_another_policys_samples() -> None:
    logits, behaviour = BANDIT.logits(0), BANDIT.logits(5)
    found = expected_gradient(BANDIT, corrected(1e3), logits, group_size=2, behaviour=behaviour)
    torch.testing.assert_close(found, gradient(BANDIT.mean_reward, logits), **LIMIT)


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_a_correction_is_biased_by_what_it_takes_from_the_ratios(kind: str) -> None:
    logits, behaviour = BANDIT.logits(0), BANDIT.logits(5)
    own, other = BANDIT.probabilities(logits), BANDIT.probabilities(behaviour)
    ratios = own / other
    low, high = 0.6, 1.5
    assert ratios.max() > high and ratios.min() < low
    if kind == "truncated":
        factors = ratios.minimum(torch.tensor(high))
    else:
        factors = torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)
    # The others of the group are another policy's, too: their mean is the baseline.
    advantages = rewards(BANDIT) - (other * rewards(BANDIT)).sum()
    exact = ((other * factors * advantages)[:, None] * scores(BANDIT, logits)).sum(0)
    given = corrected(high, name=kind, low=low)
    found = expected_gradient(BANDIT, given, logits, group_size=2, behaviour=behaviour)
    torch.testing.assert_close(found, exact, **LIMIT)


@pytest.mark.parametrize("preset", ["tis", "icepop", "decoupled_ppo"])
def test_clipped_losses_with_corrections_follow_the_mean_reward_where_nothing_is_cut(
    preset: str,
) -> None:
    logits, behaviour = BANDIT.logits(0, 0.2), BANDIT.logits(5, 0.2)
    given = SUMMED | {"preset": preset, "advantage_estimator": {"name": "leave_one_out"}}
    found = expected_gradient(
        BANDIT, given, logits, group_size=2, behaviour=behaviour, proximal=logits
    )
    torch.testing.assert_close(found, gradient(BANDIT.mean_reward, logits), **LIMIT)


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    logits, behaviour = PAIRS.logits(0), PAIRS.logits(5)
    ratios = (PAIRS.logprobs(logits) - PAIRS.logprobs(behaviour)).exp()
    assert ratios.max() > 1.2
    chances = PAIRS.probabilities(behaviour)
    advantages = rewards(PAIRS) - (chances * rewards(PAIRS)).sum()
    factors = chances[:, None] * ratios.clamp(0.0, 1.2) * advantages[:, None]
    exact = (factors[:, :, None] * token_scores(PAIRS, logits)).sum((0, 1))
    given = SUMMED | {
        "preset": "cispo",
        "policy_loss": {"eps_high": 0.2},
        "advantage_estimator": {"name": "leave_one_out"},
    }
    found = expected_gradient(PAIRS, given, logits, group_size=2, behaviour=behaviour)
    torch.testing.assert_close(found, exact, **LIMIT)


def test_gspo_clips_whole_sequences() -> None:
    logits, behaviour = PAIRS.logits(0), PAIRS.logits(5)
    chances = PAIRS.probabilities(behaviour)
    advantages = rewards(PAIRS) - (chances * rewards(PAIRS)).sum()

    def policy_loss(leaf: Tensor) -> Tensor:
        ratio = (PAIRS.logprobs(leaf) - PAIRS.logprobs(behaviour)).mean(1).exp()
        free, bounded = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        return (chances * free.minimum(bounded)).sum()

    exact = gradient(policy_loss, logits)
    given = {
        "preset": "gspo",
        "normalization": {"name": "none"},
        "policy_loss": {"eps_low": 0.2, "eps_high": 0.2},
        "advantage_estimator": {"name": "leave_one_out"},
    }
    # Others of the group are drawn, so that the sign of an advantage is, too: one by one here.
    total = torch.zeros_like(exact)
    r = rewards(PAIRS)
    for other, chance in enumerate(chances):
        advantages = r - r[other]
        total += chance * gradient(policy_loss, logits)
    found = expected_gradient(
        PAIRS, given, logits, group_size=2, behaviour=behaviour, proximal=behaviour
    )
    torch.testing.assert_close(found, total, **LIMIT)


def test_a_dual_clip_bounds_what_a_bad_token_costs() -> None:
    logits, behaviour = BANDIT.logits(0, 2.0), BANDIT.logits(5, 2.0)
    own, other = BANDIT.probabilities(logits), BANDIT.probabilities(behaviour)
    ratios, r = own / other, rewards(BANDIT)
    assert ratios.max() > 3
    exact = torch.zeros(5, dtype=torch.float64)
    for i, j in product(range(5), repeat=2):
        advantage = (r[i] - r[j]) * 0.5
        is_cut = (ratios[i] > 1.28 and advantage > 0) or (ratios[i] < 0.8 and advantage < 0)
        is_cut |= bool(ratios[i] > 3 and advantage < 0)
        if not is_cut:
            exact += other[i] * other[j] * ratios[i] * advantage * scores(BANDIT, logits)[i]
    given = SUMMED | {"policy_loss": {"dual_clip": 3.0}}
    found = expected_gradient(BANDIT, given, logits, group_size=2, behaviour=behaviour)
    torch.testing.assert_close(found, exact, **LIMIT)


# --- regressions -------------------------------------------------------------------------------

BETA = 0.4


def regularised(table: Table, reference: Tensor) -> Any:
    return lambda leaf: table.mean_reward(leaf) - BETA * table.kl(leaf, reference)


def optimal_logprobs(table: Table, reference: Tensor) -> Tensor:
    """[outcomes] of the best policy that KL holds to the reference."""
    weighted = table.logprobs(reference).sum(1) + rewards(table) / BETA
    return weighted.log_softmax(0)


def agro(**more: Any) -> dict[str, Any]:
    return {"preset": "agro", "shaping": {"temperature": BETA}, **more}


@TABLES
def test_agro_on_policy_follows_reward_less_kl(table: Table) -> None:
    logits, reference = table.logits(0), table.logits(5)
    found = expected_gradient(table, agro(), logits, group_size=2, reference=reference)
    torch.testing.assert_close(found, gradient(regularised(table, reference), logits), **LIMIT)


@TABLES
def test_agro_follows_the_variance_of_its_residual_whoever_sampled(table: Table) -> None:
    logits, reference, behaviour = table.logits(0), table.logits(5), table.logits(9)
    chances = table.probabilities(behaviour)

    def half_variance(leaf: Tensor) -> Tensor:
        ratio = (table.logprobs(leaf) - table.logprobs(reference)).sum(1)
        residual = rewards(table) - BETA * ratio
        return (chances * (residual - (chances * residual).sum()).square()).sum() / 2

    found = expected_gradient(
        table, agro(), logits, group_size=2, behaviour=behaviour, reference=reference
    )
    torch.testing.assert_close(found, -gradient(half_variance, logits) / BETA, **LIMIT)


def test_agro_is_at_rest_at_the_best_policy_whoever_sampled() -> None:
    reference, behaviour = BANDIT.logits(5), BANDIT.logits(9)
    best = optimal_logprobs(BANDIT, reference)
    found = expected_gradient(
        BANDIT, agro(), best, group_size=2, behaviour=behaviour, reference=reference
    )
    torch.testing.assert_close(found, torch.zeros_like(found), **LIMIT)


def test_agro_learns_nothing_from_a_completion_alone_in_its_group() -> None:
    # One completion has no variance, however far the policy is from the reference.
    logits, reference = PAIRS.logits(0), PAIRS.logits(5)
    found = expected_gradient(PAIRS, agro(), logits, group_size=1, reference=reference)
    assert not found.any()


@pytest.mark.parametrize("shaping", ["regression", "cross_entropy"])
def test_spo_follows_its_loss_with_the_value_of_its_group(shaping: str) -> None:
    logits, reference, behaviour = PAIRS.logits(0), PAIRS.logits(5), PAIRS.logits(9)
    r, top = rewards(PAIRS), 2.0
    chances = PAIRS.probabilities(behaviour)
    exact = torch.zeros_like(logits)
    for i, j in product(range(9), repeat=2):
        value = BETA * (r[[i, j]] / BETA).exp().mean().log()

        def loss(leaf: Tensor, i: int = i, value: Tensor = value) -> Tensor:
            ratio = (PAIRS.logprobs(leaf) - PAIRS.logprobs(reference)).sum(1)[i]
            found = value + BETA * ratio
            if shaping == "regression":
                return (r[i] - found).square() / 2 / BETA
            q, p = ((r[i] - top) / BETA).exp(), ((found - top).clamp_max(-1e-6) / BETA).exp()
            return -(q * p.log() + (1 - q) * (1 - p).log())

        exact -= chances[i] * chances[j] * gradient(loss, logits)
    given = {
        "preset": "spo",
        "advantage_estimator": {"name": "soft_value", "temperature": BETA},
        "shaping": {"name": shaping, "temperature": BETA, "top_reward": top, "baseline": "none"},
    }
    found = expected_gradient(
        PAIRS, given, logits, group_size=2, behaviour=behaviour, reference=reference
    )
    torch.testing.assert_close(found, exact, **LIMIT)


def dro(**more: Any) -> dict[str, Any]:
    return {"preset": "dro", "shaping": {"temperature": BETA}, **more}


@TABLES
def test_dro_follows_its_squared_residual_whoever_sampled(table: Table) -> None:
    logits, reference, behaviour = table.logits(0), table.logits(5), table.logits(9)
    chances, value = table.probabilities(behaviour), 0.3

    def half_square(leaf: Tensor) -> Tensor:
        ratio = (table.logprobs(leaf) - table.logprobs(reference)).sum(1)
        return (chances * (rewards(table) - value - BETA * ratio).square()).sum() / 2

    found = expected_gradient(
        table,
        dro(),
        logits,
        group_size=1,
        behaviour=behaviour,
        reference=reference,
        value=value,
    )
    torch.testing.assert_close(found, -gradient(half_square, logits) / BETA, **LIMIT)


def test_dro_finds_policy_and_value_from_single_samples_of_another_policy() -> None:
    reference, behaviour = BANDIT.logits(5), torch.zeros(5, dtype=torch.float64)
    best = optimal_logprobs(BANDIT, reference)
    best_value = BETA * (reference.log_softmax(0) + rewards(BANDIT) / BETA).logsumexp(0)
    logits = reference.clone()
    head = ValueHead(1, 2e-2, torch.device("cpu"), add_up=lambda sums: None)
    features = torch.tensor([[1.0, 1.0]])
    for _ in range(400):
        value = head.values(features)
        ratios = logits.log_softmax(0) - reference.log_softmax(0)
        logits += 2.0 * expected_gradient(
            BANDIT,
            dro(),
            logits,
            group_size=1,
            behaviour=behaviour,
            reference=reference,
            value=float(value),
        )
        # Every arm is as likely.
        residuals = (rewards(BANDIT) - BETA * ratios).float() - value
        head.add(features.expand(5, -1), residuals, torch.ones(5).bool())
        head.step()
    kl = float((best.exp() * (best - logits.log_softmax(0))).sum())
    assert kl < 1e-3
    assert float(head.values(features)) == pytest.approx(float(best_value), abs=1e-2)


@pytest.mark.parametrize(
    ("given", "reaches"),
    [
        (agro(), True),
        ({"preset": "rloo", "kl": {"placement": "loss", "coefficient": BETA},
          "reference": {"policy": "start"}}, False),
    ],
    ids=["agro", "policy gradient"],
)  # fmt: skip
def test_only_a_regression_reaches_the_best_policy_from_another_policys_samples(
    given: dict[str, Any], reaches: bool
) -> None:
    reference, behaviour = BANDIT.logits(5), torch.zeros(5, dtype=torch.float64)
    best = optimal_logprobs(BANDIT, reference)
    logits = reference.clone()
    for _ in range(150):
        logits += 4.0 * expected_gradient(
            BANDIT, given, logits, group_size=2, behaviour=behaviour, reference=reference
        )
    kl = float((best.exp() * (best - logits.log_softmax(0))).sum())
    assert (kl < 1e-3) == reaches, kl
