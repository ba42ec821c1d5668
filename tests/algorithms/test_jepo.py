"""JEPO: the gradient of the bound by listing all thoughts, and what holds of its advantage
estimator."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.shaping import gold_advantages
from tests.algorithms.tabular import PAIRS, expected_gradient, gradient

LIMIT = {"rtol": 0.0, "atol": 1e-6}
GOLD = 1
UNBOUNDED = 1e9


def given(support: float, bound: float = UNBOUNDED) -> dict:
    """The preset without its normalised parts, KL and format."""
    return {
        "preset": "jepo",
        "advantage_estimator": {"name": "zero"},
        "normalization": {"name": "none"},
        "shaping": {"support": support, "bound": bound},
        "kl": {"placement": "none"},
        "reference": {"policy": "none"},
    }


def thoughts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each first token: its logprob, and that of the reference answer behind it."""
    rows = PAIRS.logprobs(logits).reshape(PAIRS.vocab, PAIRS.vocab, 2)
    return rows[:, 0, 0], rows[:, GOLD, 1]


def log_mean_exp(values: Tensor) -> Tensor:
    return values.exp().mean().log()


def bound(logits: Tensor, n: int, constant: Tensor | None = None) -> Tensor:
    """E over n thoughts of log of the mean likelihood; constant: thoughts drawn by these logits."""
    own, answers = thoughts(logits)
    chances = own.exp() if constant is None else thoughts(constant)[0].exp()
    return sum(
        chances[list(places)].prod() * log_mean_exp(answers[list(places)])
        for places in product(range(PAIRS.vocab), repeat=n)
    )


def spread_of_advantage_estimator(logits: Tensor, n: int) -> Tensor:
    """Standard deviation of A over all members of all groups, each outcome once."""
    _, answers = thoughts(logits)
    found = []
    for places in product(range(PAIRS.vocab), repeat=n):
        values = answers[list(places)]
        for i in range(n):
            others = torch.cat([values[:i], values[i + 1 :]])
            found.append(log_mean_exp(values) - log_mean_exp(others))
    return torch.stack(found).std(correction=0)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "policy_loss",
    [{"name": "reinforce"}, {"name": "clipped"}, {"name": "clipped", "level": "sequence"}],
    ids=["reinforce", "clipped", "sequences"],
)
def test_the_gradient_is_that_of_the_bound(n: int, policy_loss: dict[str, str]) -> None:
    logits = PAIRS.logits(3)
    spread = spread_of_advantage_estimator(logits, n)
    # The answers' part, thoughts held fixed, and that of the thoughts, answers held fixed.
    answers = gradient(lambda leaf: bound(leaf, n, constant=logits), logits)
    whole = gradient(lambda leaf: bound(leaf, n), logits)
    for support in (0.0, 1.0):
        objective = given(support) | {"policy_loss": policy_loss}
        found = expected_gradient(PAIRS, objective, logits, group_size=n, gold=GOLD)
        # The loss is a mean over members, the estimator a sum over them.
        exact = (whole - answers) / spread / n + support * answers
        torch.testing.assert_close(found, exact, **LIMIT)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_penalty_is_the_thoughts_kl_and_leaves_the_answer_out(placement: str) -> None:
    logits, reference = PAIRS.logits(3), PAIRS.logits(7)

    def kl(leaf: Tensor) -> Tensor:
        own, other = thoughts(leaf)[0], thoughts(reference)[0]
        return (own.exp() * (own - other)).sum()

    penalty = {"kl": {"coefficient": 0.7, "placement": placement}, "reference": {"policy": "start"}}
    with_kl, without = (
        expected_gradient(
            PAIRS, given(1.0) | more, logits, group_size=2, gold=GOLD, reference=reference
        )
        for more in (penalty, {})
    )
    torch.testing.assert_close(with_kl - without, -0.7 * gradient(kl, logits), **LIMIT)


def test_more_samples_tighten_the_bound() -> None:
    logits = PAIRS.logits(3)
    own, answers = thoughts(logits)
    values = [float(bound(logits, n)) for n in (1, 2, 3)]
    assert values == sorted(values)
    assert values[-1] < float((own + answers).logsumexp(0))


def test_the_sampled_answers_do_not_count() -> None:
    """Only thoughts and reference answers have a gradient: other answers' logits have that of the
    softmax alone."""
    logits = PAIRS.logits(3)
    found = expected_gradient(PAIRS, given(0.0), logits, group_size=2, gold=GOLD)
    assert found[: PAIRS.vocab].abs().max() > 1e-3
    torch.testing.assert_close(found[PAIRS.vocab :], torch.zeros_like(found[PAIRS.vocab :]))


def test_advantages_are_cut_at_the_bound() -> None:
    logits = PAIRS.logits(3)
    spread, cut = spread_of_advantage_estimator(logits, 2), 0.5
    own, answers = thoughts(logits)
    exact = torch.zeros_like(logits)
    jacobian = torch.autograd.functional.jacobian(lambda leaf: thoughts(leaf)[0], logits)
    is_cut = False
    for first, second in product(range(PAIRS.vocab), repeat=2):
        pair = answers[[first, second]]
        for thought, other in ((first, pair[1]), (second, pair[0])):
            advantage = (log_mean_exp(pair) - other) / spread
            is_cut |= bool(advantage.abs() > cut)
            chance = own[[first, second]].sum().exp()
            exact += chance * advantage.clamp(-cut, cut) * jacobian[thought] / 2
    assert is_cut
    found = expected_gradient(PAIRS, given(0.0, cut), logits, group_size=2, gold=GOLD)
    torch.testing.assert_close(found, exact, **LIMIT)


# --- advantage estimator
# ------------------------------------------------------------------------------------


def test_equal_likelihoods_give_no_advantage_and_equal_shares() -> None:
    values = torch.full((1, 4), -3.0, dtype=torch.float64)
    advantages, shares = gold_advantages(values, torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(advantages, torch.zeros_like(values), rtol=0, atol=1e-12)
    torch.testing.assert_close(shares, torch.full_like(values, 0.25))


def test_a_constant_changes_nothing_and_tiny_likelihoods_are_stable() -> None:
    values = torch.tensor([[-1.0, -2.5, -0.2, -4.0]], dtype=torch.float64)
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    for moved in (values - 1e4, values - 7.0):
        for found, expected in zip(
            gold_advantages(moved, everywhere), gold_advantages(values, everywhere), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_one_answer_alone_is_learnt_as_it_is() -> None:
    values = torch.tensor([[-1.0, 0.0, 0.0]], dtype=torch.float64)
    advantages, shares = gold_advantages(values, torch.tensor([[True, False, False]]))
    assert advantages.tolist() == [[0.0, 0.0, 0.0]]
    assert shares.tolist() == [[1.0, 0.0, 0.0]]


def test_members_without_an_answer_are_in_no_mean() -> None:
    values = torch.tensor([[-1.0, 9.0, -2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    has_gold = torch.tensor([[True, False, True], [False, False, False]])
    advantages, shares = gold_advantages(values, has_gold)
    pair = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    whole = log_mean_exp(pair)
    expected = torch.tensor([float(whole) + 2.0, 0.0, float(whole) + 1.0], dtype=torch.float64)
    torch.testing.assert_close(advantages[0], expected)
    torch.testing.assert_close(shares[0][[0, 2]], pair.softmax(0))
    assert not advantages[1].any() and not shares[1].any()
