"""SPO with the soft value under the reference: its estimate and its gradient, whoever sampled."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.shaping import cross_entropy
from megatron_rl.algorithms.soft_value import SoftValues, soft_values
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import ShapingConfig
from tests.algorithms.tabular import BANDIT, LIMIT, PAIRS, Table, expected_gradient, gradient

BETA = 0.4
TABLES = pytest.mark.parametrize("table", [BANDIT, PAIRS], ids=["bandit", "pairs"])


def rewards(table: Table) -> Tensor:
    return torch.tensor(table.rewards, dtype=torch.float64)


def spo(**more: Any) -> dict[str, Any]:
    return {"preset": "spo", "shaping": {"temperature": BETA, **more}}


def terms(table: Table, reference: Tensor, behaviour: Tensor) -> Tensor:
    """[outcomes] u = exp(r / beta) ref / behaviour."""
    ratios = table.probabilities(reference) / table.probabilities(behaviour)
    return (rewards(table) / BETA).exp() * ratios


def true_value(table: Table, reference: Tensor) -> float:
    return BETA * math.log(
        float((table.probabilities(reference) * (rewards(table) / BETA).exp()).sum())
    )


def mean_value(table: Table, reference: Tensor, behaviour: Tensor, *, others: int) -> float:
    """Of what `others` samples of the behaviour say the value is, by listing all of them."""
    u, chances = terms(table, reference, behaviour), table.probabilities(behaviour)
    return sum(
        float(chances[list(places)].prod()) * BETA * math.log(float(u[list(places)].mean()))
        for places in product(range(len(u)), repeat=others)
    )


def best_policy(table: Table, reference: Tensor) -> Tensor:
    """[logits] of a bandit: the best policy that KL holds to the reference."""
    return (table.logprobs(reference).sum(1) + rewards(table) / BETA).log_softmax(0)


def values_of(
    table: Table, groups: list[tuple[int, ...]], reference: Tensor, behaviour: Tensor
) -> SoftValues:
    """The product's, of groups of outcomes, each [groups, members]."""
    places = torch.tensor(groups)
    count, length = places.numel(), table.length
    flat = places.flatten()

    def per_token(values: Tensor) -> Tensor:
        return values[flat].flatten()

    sequence_of = torch.arange(count).repeat_interleave(length)
    segments = Segments(
        sequence_of,
        torch.arange(1, count + 1) * length,
        torch.arange(count) // places.shape[1],
        torch.arange(count) % places.shape[1],
        groups=len(groups),
        members=places.shape[1],
    )
    zeros = torch.zeros(count * length, dtype=torch.float64)
    tokens = Tokens(
        logprobs=zeros,
        generator_logprobs=per_token(table.logprobs(behaviour)),
        advantages=zeros,
        rewards=per_token(rewards(table)[:, None].expand(-1, length)),
        weights=zeros,
        is_real=zeros == 0,
        lags=sequence_of,
        segments=segments,
        is_gold=zeros != 0,
        reference_logprobs=per_token(table.logprobs(reference)),
    )
    found = soft_values(tokens, BETA)
    return SoftValues(*(values.reshape(places.shape) for values in found))


# --- the estimate ------------------------------------------------------------------------------


@TABLES
@pytest.mark.parametrize("others", [1, 2])
def test_its_exponential_is_unbiased_whoever_sampled(table: Table, others: int) -> None:
    reference, behaviour = table.logits(5), table.logits(9)
    groups = list(product(range(len(table.rewards)), repeat=others + 1))
    chances = table.probabilities(behaviour)[torch.tensor(groups)].prod(1)
    found = values_of(table, groups, reference, behaviour).values
    for member in range(others + 1):
        mean = float((chances * (found[:, member] / BETA).exp()).sum())
        assert BETA * math.log(mean) == pytest.approx(true_value(table, reference), abs=1e-6)


@TABLES
def test_it_is_exact_for_any_group_that_the_best_policy_sampled(table: Table) -> None:
    reference = table.logits(5)
    # Of the pairs: the best policy of both tokens, as a table of tokens.
    best = (table.logprobs(reference).sum(1) + rewards(table) / BETA).log_softmax(0)
    if table is PAIRS:
        grid = best.reshape(3, 3)
        best = torch.cat([grid.logsumexp(1), grid.log_softmax(1).flatten()])
    groups = list(product(range(len(table.rewards)), repeat=2))
    found = values_of(table, groups, reference, best)
    exact = torch.full_like(found.values, true_value(table, reference))
    torch.testing.assert_close(found.values, exact, **LIMIT)
    torch.testing.assert_close(found.effective_shares, torch.ones_like(exact), **LIMIT)


def test_of_the_references_own_samples_it_is_the_mean_of_exp_over_the_others() -> None:
    reference = BANDIT.logits(5)
    found = values_of(BANDIT, [(1, 2, 4)], reference, reference).values[0]
    r = BANDIT.rewards
    for member, (first, second) in enumerate([(2, 4), (1, 4), (1, 2)]):
        mean = (math.exp(r[first] / BETA) + math.exp(r[second] / BETA)) / 2
        assert float(found[member]) == pytest.approx(BETA * math.log(mean), abs=1e-6)


def test_the_effective_share_of_a_group() -> None:
    reference, behaviour = BANDIT.logits(5), BANDIT.logits(9)
    u = terms(BANDIT, reference, behaviour)[[0, 1, 1, 3]]
    found = values_of(BANDIT, [(0, 1, 1, 3)], reference, behaviour).effective_shares
    share = float(u.sum().square() / (4 * u.square().sum()))
    assert found.flatten().tolist() == pytest.approx([share] * 4, abs=1e-6)


def test_a_completion_without_others_has_its_own_reward() -> None:
    found = values_of(BANDIT, [(3,), (1,)], BANDIT.logits(5), BANDIT.logits(9))
    assert found.values.flatten().tolist() == pytest.approx([0.35, 1.0])
    assert found.effective_shares.flatten().tolist() == [1.0, 1.0]


def test_it_is_finite_for_log_ratios_of_long_completions() -> None:
    reference = torch.tensor([-3000.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    behaviour = torch.tensor([0.0, -3000.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = values_of(BANDIT, [(0, 1), (0, 0)], reference, behaviour)
    # Each of the first group has the other's value; those of the second are alike.
    expected = [1.0 + 3000 * BETA, 0.1 - 3000 * BETA]
    assert found.values[0].tolist() == pytest.approx(expected, rel=1e-3)
    assert found.effective_shares[:, 0].tolist() == pytest.approx([0.5, 1.0])


# --- the gradient ------------------------------------------------------------------------------


@TABLES
@pytest.mark.parametrize("size", [2, 3])
def test_on_policy_it_follows_reward_less_kl(table: Table, size: int) -> None:
    logits, reference = table.logits(0), table.logits(5)
    found = expected_gradient(table, spo(), logits, group_size=size, reference=reference)

    def regularised(leaf: Tensor) -> Tensor:
        return table.mean_reward(leaf) - BETA * table.kl(leaf, reference)

    torch.testing.assert_close(found, gradient(regularised, logits), **LIMIT)


@TABLES
@pytest.mark.parametrize("size", [2, 3])
def test_off_policy_it_follows_its_squared_residual_with_a_value_low_by_jensen(
    table: Table, size: int
) -> None:
    logits, reference, behaviour = table.logits(0), table.logits(5), table.logits(9)
    chances = table.probabilities(behaviour)
    value = mean_value(table, reference, behaviour, others=size - 1)
    assert value < true_value(table, reference) - 1e-3

    def half_square(leaf: Tensor) -> Tensor:
        ratio = (table.logprobs(leaf) - table.logprobs(reference)).sum(1)
        return (chances * (rewards(table) - value - BETA * ratio).square()).sum() / 2

    found = expected_gradient(
        table, spo(), logits, group_size=size, behaviour=behaviour, reference=reference
    )
    torch.testing.assert_close(found, -gradient(half_square, logits) / BETA, **LIMIT)


def test_the_cross_entropy_takes_the_same_value() -> None:
    logits, reference, behaviour = PAIRS.logits(0), PAIRS.logits(5), PAIRS.logits(9)
    r, top, u = rewards(PAIRS), 2.0, terms(PAIRS, reference, behaviour)
    chances = PAIRS.probabilities(behaviour)
    exact = torch.zeros_like(logits)
    for i, j in product(range(9), repeat=2):
        value = BETA * u[j].log()

        def loss(leaf: Tensor, i: int = i, value: Tensor = value) -> Tensor:
            ratio = (PAIRS.logprobs(leaf) - PAIRS.logprobs(reference)).sum(1)[i]
            found = value + BETA * ratio
            q, p = ((r[i] - top) / BETA).exp(), ((found - top).clamp_max(-1e-6) / BETA).exp()
            return -(q * p.log() + (1 - q) * (1 - p).log())

        exact -= chances[i] * chances[j] * gradient(loss, logits)
    given = spo(name="cross_entropy", top_reward=top)
    found = expected_gradient(
        PAIRS, given, logits, group_size=2, behaviour=behaviour, reference=reference
    )
    torch.testing.assert_close(found, exact, **LIMIT)


def test_a_reply_is_held_to_its_own_return_and_all_replies_to_one_policy() -> None:
    segments = Segments(*(torch.tensor(found) for found in ([0, 0], [2], [0], [0])))
    ones = torch.ones(2, dtype=torch.float64)
    returns = torch.tensor([1.0, 0.6], dtype=torch.float64)
    tokens = Tokens(
        logprobs=-ones, generator_logprobs=-ones, advantages=returns, rewards=ones, weights=ones,
        is_real=ones > 0, lags=torch.zeros(2).long(), segments=segments, is_gold=ones < 0,
        reference_logprobs=-1.2 * ones, values=0.5 * ones,
    )  # fmt: skip
    cfg = ShapingConfig(name="cross_entropy", baseline="soft", temperature=0.5, top_reward=2.0)
    # log p = (V + beta S - top) / beta with S = 2 x 0.2; log q = (return - top) / beta.
    p, qs = math.exp((0.5 + 0.5 * 0.4 - 2) / 0.5), (math.exp(-2.0), math.exp(-2.8))
    expected = [(q - p) / (1 - p) for q in qs]
    assert cross_entropy(tokens, cfg).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sampled_by", ["best", "reference"])
def test_it_rests_at_the_best_policy(sampled_by: str) -> None:
    reference = BANDIT.logits(5)
    best = best_policy(BANDIT, reference)
    behaviour = best if sampled_by == "best" else reference
    found = expected_gradient(
        BANDIT, spo(), best, group_size=3, behaviour=behaviour, reference=reference
    )
    # Of the reference's samples: but for what its value is low by, times the mean score.
    own, other = best.exp(), BANDIT.probabilities(behaviour)
    low = true_value(BANDIT, reference) - mean_value(BANDIT, reference, behaviour, others=2)
    torch.testing.assert_close(found, low * (other - own), **LIMIT)


def test_off_policy_it_rests_close_to_the_best_policy_with_groups_of_four() -> None:
    reference, behaviour = BANDIT.logits(5), torch.zeros(5, dtype=torch.float64)
    value = mean_value(BANDIT, reference, behaviour, others=3)
    logits = reference.clone()
    for _ in range(4000):
        # Its gradient in closed form: residuals of a value that is low, every arm as likely.
        ratios = logits.log_softmax(0) - reference.log_softmax(0)
        residuals = (rewards(BANDIT) - value - BETA * ratios) / 5
        logits += 0.5 * (residuals - logits.softmax(0) * residuals.sum())
    best = best_policy(BANDIT, reference)
    assert float((best.exp() * (best - logits.log_softmax(0))).sum()) < 1e-3
    found = expected_gradient(
        BANDIT, spo(), logits, group_size=4, behaviour=behaviour, reference=reference
    )
    torch.testing.assert_close(found, torch.zeros_like(found), **LIMIT)
