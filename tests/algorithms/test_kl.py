"""KL: the mean of every form by listing all outcomes, against the exact gradient; variances."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.kl import kl_advantages
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import KlConfig
from tests.algorithms.tabular import (
    BANDIT,
    LIMIT,
    PAIRS,
    SUMMED,
    Table,
    expected_gradient,
    gradient,
    sample_gradients,
    token_scores,
)

ALL = {"bandit": BANDIT, "pairs": PAIRS, "triples": Table(3, 3, (0.0,) * 27)}
TRIPLES = ALL["triples"]
EXACT = {"placement": "loss", "estimator": "exact"}
CLIPPED_SEQUENCES = {"name": "clipped", "level": "sequence"}
"""Tokens whose advantages differ share one importance ratio."""
BANDIT_AND_PAIRS = pytest.mark.parametrize("table", [BANDIT, PAIRS], ids=["bandit", "pairs"])
TABLES = pytest.mark.parametrize("table", ALL.values(), ids=ALL)


def kl_alone(**kl: Any) -> dict[str, Any]:
    return SUMMED | {
        "advantage_estimator": {"name": "zero"},
        "policy_loss": {"name": "reinforce"},
        "kl": {"coefficient": 0.7, **kl},
        "reference": {"policy": "start"},
    }


@BANDIT_AND_PAIRS
@pytest.mark.parametrize(
    ("placement", "policy_loss"),
    [("reward", {"name": "reinforce"}), ("reward", CLIPPED_SEQUENCES),
     ("loss", {"name": "reinforce"})],
    ids=["reward", "reward-sequences", "loss"],
)  # fmt: skip
def test_kl_is_followed_exactly_as_reward_and_as_loss(
    table: Table, placement: str, policy_loss: dict[str, str]
) -> None:
    logits, reference = table.logits(0), table.logits(5)
    exact = -0.7 * gradient(lambda leaf: table.kl(leaf, reference), logits)
    given = kl_alone(placement=placement) | {"policy_loss": policy_loss}
    found = expected_gradient(table, given, logits, group_size=2, reference=reference)
    torch.testing.assert_close(found, exact, **LIMIT)


def test_sums_to_the_end_of_a_sequence_are_those_of_its_tokens_alone() -> None:
    lengths = torch.tensor([1, 7, 2, 19, 1, 64])
    values = torch.randn(int(lengths.sum()), generator=torch.Generator().manual_seed(0))
    # Beside it differences of sums over all tokens would lose what the others have.
    values[0] = 1e30
    expected = [part.double().flip(0).cumsum(0).flip(0) for part in values.split(lengths.tolist())]
    numbers = torch.arange(len(lengths))
    of = numbers.repeat_interleave(lengths)
    found = Segments(of, lengths.cumsum(0), numbers, numbers * 0).to_go(values)
    torch.testing.assert_close(found, torch.cat(expected).float(), rtol=1e-6, atol=1e-6)


def test_the_baseline_of_a_sequence_is_the_sum_of_the_other_one() -> None:
    of, numbers = torch.tensor([0, 0, 1, 1]), torch.arange(2)
    nothing, everywhere = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    tokens = Tokens(
        logprobs=torch.tensor([0.1, 0.2, 0.3, 0.4]), generator_logprobs=nothing,
        advantages=nothing, rewards=nothing, weights=nothing, is_real=everywhere, lags=of * 0,
        segments=Segments(of, torch.tensor([2, 4]), numbers * 0, numbers, groups=1, members=2),
        is_gold=~everywhere, reference_logprobs=nothing,
    )  # fmt: skip
    found = kl_advantages(tokens, KlConfig(placement="reward", coefficient=1.0))
    # To go 0.3 and 0.2, less 0.7; 0.7 and 0.4, less 0.3.
    torch.testing.assert_close(found, torch.tensor([0.4, 0.5, -0.4, -0.1]))


@TABLES
@pytest.mark.parametrize(
    "policy_loss",
    [{"name": "reinforce"}, {"name": "clipped"}, CLIPPED_SEQUENCES, {"name": "cispo"}],
    ids=["reinforce", "clipped", "sequences", "cispo"],
)
def test_exact_kl_is_followed_exactly(table: Table, policy_loss: dict[str, str]) -> None:
    logits, reference = table.logits(0), table.logits(5)
    exact = -0.7 * gradient(lambda leaf: table.kl(leaf, reference), logits)
    given = kl_alone(**EXACT) | {"policy_loss": policy_loss}
    found = expected_gradient(table, given, logits, group_size=1, reference=reference)
    torch.testing.assert_close(found, exact, **LIMIT)


def test_exact_kl_of_the_position_alone_misses_what_a_token_does_to_later_ones() -> None:
    logits, reference = TRIPLES.logits(0), TRIPLES.logits(5)
    chances, each = TRIPLES.probabilities(logits), TRIPLES.kl_of_positions(logits, reference)
    later = each.flip(1).cumsum(1).flip(1) - each
    effect = (later[:, :, None] * token_scores(TRIPLES, logits)).sum(1)
    missed = (chances[:, None] * effect).sum(0)
    assert missed.norm() > 0.1
    exact = gradient(lambda leaf: TRIPLES.kl(leaf, reference), logits)
    given = kl_alone(**EXACT, horizon="token")
    found = expected_gradient(TRIPLES, given, logits, group_size=1, reference=reference)
    torch.testing.assert_close(found, -0.7 * (exact - missed), **LIMIT)
    logits, reference = PAIRS.logits(0), PAIRS.logits(5)
    exact = gradient(lambda leaf: PAIRS.kl(leaf, reference), logits)
    found = expected_gradient(PAIRS, given, logits, group_size=1, reference=reference)
    assert round(float(torch.cosine_similarity(-found, exact, 0)), 3) == 0.999


def apart(table: Table, distance: float) -> tuple[Tensor, Tensor]:
    """Logits of a policy and of a reference, so far from it."""
    logits = table.logits(0)
    return logits, logits + distance * (table.logits(5) - logits)


def variance(table: Table, distance: float, **kl: Any) -> float:
    """Of the gradient of one sequence, summed over the logits."""
    logits, reference = apart(table, distance)
    found = sample_gradients(table, kl_alone(**kl), logits, reference=reference)
    chances = table.probabilities(logits)[:, None]
    return float((chances * (found - (chances * found).sum(0)).square()).sum())


@pytest.mark.parametrize(
    ("table", "distance", "to_go", "exact"),
    [
        (PAIRS, 0.1, 0.86, 0.04), (PAIRS, 1.0, 0.75, 0.11), (PAIRS, 3.0, 0.51, 0.13),
        (TRIPLES, 0.1, 0.61, 0.07), (TRIPLES, 1.0, 0.57, 0.17), (TRIPLES, 3.0, 0.49, 0.18),
    ],
)  # fmt: skip
def test_variances_beside_that_of_k2_are_those_of_the_guide(
    table: Table, distance: float, to_go: float, exact: float
) -> None:
    k2 = variance(table, distance, placement="loss")
    assert round(variance(table, distance, placement="reward") / k2, 2) == to_go
    assert round(variance(table, distance, **EXACT) / k2, 2) == exact


@TABLES
@pytest.mark.parametrize("distance", [0.1, 1.0, 3.0])
def test_exact_kl_varies_less_than_estimates_from_samples(table: Table, distance: float) -> None:
    found = variance(table, distance, **EXACT)
    for placement in ("loss", "reward"):
        assert found < 0.5 * variance(table, distance, placement=placement)
    if table.length == 1:
        # Nothing is sampled that it depends on.
        assert found == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("table", [PAIRS, TRIPLES], ids=["pairs", "triples"])
@pytest.mark.parametrize("distance", [0.1, 1.0, 3.0])
def test_a_baseline_of_the_group_would_add_to_the_variance_of_exact_kl(
    table: Table, distance: float
) -> None:
    logits, reference = apart(table, distance)
    chances = table.probabilities(logits)
    alone = sample_gradients(table, kl_alone(**EXACT), logits, reference=reference)
    sums = table.kl_of_positions(logits, reference).sum(1)
    # Of all pairs of sequences: each with the other's sum as its baseline, as k1 to go has it.
    added = 0.7 * sums[None, :, None] * token_scores(table, logits).sum(1)[:, None]
    found = (alone[:, None] + added) / 2
    found = found + found.transpose(0, 1)
    pairs = (chances[:, None] * chances)[..., None]
    mean = (pairs * found).sum((0, 1))
    with_baseline = float((pairs * (found - mean).square()).sum())
    torch.testing.assert_close(mean, (chances[:, None] * alone).sum(0), **LIMIT)
    assert with_baseline > variance(table, distance, **EXACT) / 2


def test_forward_kl_is_that_of_the_reference_to_the_policy() -> None:
    logits, reference = BANDIT.logits(0), BANDIT.logits(5)
    exact = -0.7 * gradient(lambda leaf: BANDIT.kl(reference, leaf), logits)
    given = kl_alone(placement="loss", estimator="forward_kl")
    found = expected_gradient(BANDIT, given, logits, group_size=2, reference=reference)
    torch.testing.assert_close(found, exact, **LIMIT)


@pytest.mark.parametrize("kl", [{}, {"placement": "reward", "estimator": "k1"}], ids=str)
def test_a_teacher_is_followed_at_each_place_that_the_policy_visits(kl: dict[str, str]) -> None:
    logits, teacher = PAIRS.logits(0), PAIRS.logits(5)
    first = logits[:3].softmax(0)

    def divergence(leaf: Tensor) -> Tensor:
        """Of each place, where those before it are visited as often as now."""
        kl = torch.distributions.kl_divergence
        own, other = leaf.view(4, 3), teacher.view(4, 3)
        each = kl(torch.distributions.Categorical(logits=own),
                  torch.distributions.Categorical(logits=other))  # fmt: skip
        return each[0] + (first * each[1:]).sum()

    # Two tokens a sequence, of which the mean is taken.
    exact = -gradient(divergence, logits) / 2
    given = {"preset": "distill", "reference": {"policy": "start"}, "kl": kl}
    found = expected_gradient(PAIRS, given, logits, group_size=1, reference=teacher)
    torch.testing.assert_close(found, exact, **LIMIT)
    there = expected_gradient(PAIRS, given, teacher, group_size=1, reference=teacher)
    torch.testing.assert_close(there, torch.zeros_like(there), **LIMIT)


@pytest.mark.parametrize("kl", [{"placement": "reward"}, {"placement": "loss"}, EXACT], ids=str)
def test_no_kl_where_policy_and_reference_are_the_same(kl: dict[str, str]) -> None:
    logits = PAIRS.logits(0)
    found = expected_gradient(PAIRS, kl_alone(**kl), logits, group_size=2, reference=logits)
    torch.testing.assert_close(found, torch.zeros_like(found), **LIMIT)


def test_wrong_forms_of_kl_go_where_the_guide_says() -> None:
    logits, reference = PAIRS.logits(0), PAIRS.logits(5)
    exact = gradient(lambda leaf: PAIRS.kl(leaf, reference), logits)
    chances, tokens = PAIRS.probabilities(logits), token_scores(PAIRS, logits)
    ratios = PAIRS.logprobs(logits) - PAIRS.logprobs(reference)
    k3 = (-ratios).exp() - 1 + ratios

    def mean(slopes: Tensor) -> Tensor:
        """Of sum_t slopes_t times the gradient of token t's logprob."""
        return (chances[:, None] * (slopes[:, :, None] * tokens).sum(1)).sum(0)

    def cosine(found: Tensor) -> float:
        return round(float(torch.cosine_similarity(found, exact, 0)), 2)

    assert mean(torch.ones_like(ratios)).norm() < 1e-9
    assert cosine(mean(1 - (-ratios).exp())) == 0.97
    assert cosine(mean(k3.flip(1).cumsum(1).flip(1))) == -0.71
    assert cosine(mean(ratios.square().flip(1).cumsum(1).flip(1) / 2)) == -0.27
