"""The soft value of a prompt from samples of any policy. Pure; used by trainer ranks.

V = beta log E_ref exp(r / beta): the value of the best policy under a KL penalty to the reference.
Other policies sampled the group, so each of its sequences has the weight ref(y) / generator(y).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.algorithms.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor


class SoftValues(NamedTuple):
    """Both [sequences] float32, without gradient; any value for padding."""

    values: Tensor
    """From the other sequences of the group; without others, the sequence's own reward."""
    effective_shares: Tensor
    """Of the group: (sum u)^2 / (n sum u^2) of its terms u, from 1 / n to 1."""


def soft_values(tokens: Tokens, temperature: float) -> SoftValues:
    """beta log mean_j u_j over the others of a sequence's group, u = exp(r / beta) ref / generator.

    The mean of u is unbiased for exp(V / beta), whoever sampled; so, by Jensen, values are low on
    average, by what their spread costs. Where the best policy sampled all u are equal, and values
    exact for any two samples; dividing by the sum of the weights instead would lose that. Without
    the sequence itself, values do not depend on it: on-policy they bias no gradient.
    Only where whole groups are known. temperature: beta.
    Source: SPO (arXiv 2503.05453), section 3, where the reference samples and all weights are 1.
    """
    segments = tokens.segments
    assert tokens.reference_logprobs is not None
    is_sampled = tokens.is_real & ~tokens.is_gold
    log_ratios = tokens.reference_logprobs - tokens.generator_logprobs
    log_weights = segments.sum(log_ratios.masked_fill(~is_sampled, 0.0).double())
    # Every token has its sequence's reward.
    rewards = tokens.rewards.double()[segments.ends - 1]
    is_real = segments.group_of >= 0
    own, is_there = segments.by_member(rewards, is_real)
    terms, _ = segments.by_member(rewards / temperature + log_weights, is_real)
    values = temperature * log_mean_exp_of_others(terms, is_there)
    counts = is_there.double().sum(-1, keepdim=True)
    values = values.where(is_there & (counts > 1), own)
    listed = terms.masked_fill(~is_there, -math.inf)
    twice = listed.logsumexp(-1, keepdim=True) * 2
    shares = (twice - (2 * listed).logsumexp(-1, keepdim=True)).exp() / counts
    # Padding may have any value but NaN, as its weight is 0.
    shares = shares.where(counts > 0, shares.new_ones(())).expand_as(values)
    like = tokens.weights
    return SoftValues(segments.from_members(values, like), segments.from_members(shares, like))


def log_mean_exp_of_others(values: Tensor, is_listed: Tensor) -> Tensor:
    """[groups, members]: of each member, over the listed ones of its group but itself.

    values: [groups, members] float64. Without others: not a number, or infinite.
    """
    members = values.shape[1]
    listed = values.masked_fill(~is_listed, -math.inf)
    counts = is_listed.double().sum(-1, keepdim=True)
    is_own = values.new_ones(members).diag().bool()
    # [groups, i, members]: without i.
    others = listed[:, None].expand(-1, members, -1).masked_fill(is_own, -math.inf)
    return others.logsumexp(-1) - (counts - 1).log()
