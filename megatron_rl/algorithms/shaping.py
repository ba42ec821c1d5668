"""Shapings: advantages that depend on the current policy. Pure; used by trainer ranks.

A shaping is `f(tokens, config) -> [tokens]`, without gradient. With the attribute
`needs_groups = True` it sees whole groups of the minibatch: the trainer then computes the
minibatch's logprobs in an extra pass before the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.normalization import MIN_STD
from megatron_rl.algorithms.soft_value import log_mean_exp_of_others
from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.config.algorithm import ShapingConfig

if TYPE_CHECKING:
    from torch import Tensor

ShapingFunction = Callable[[Tokens, ShapingConfig], "Tensor"]


def needs_groups(function: Any, cfg: ShapingConfig) -> bool:
    """Whether a shaping sees whole groups."""
    if function is regression:
        return cfg.baseline == "group"
    return bool(getattr(function, "needs_groups", False))


def regression(tokens: Tokens, cfg: ShapingConfig) -> Tensor:
    """A - beta (S - b): residual of reward - V = beta log(policy / reference), S over a sequence.

    With advantage estimator leave_one_out and b the mean of S over the others of the group, sum_i
    A_i grad log pi(y_i) / n is -1 / beta times the gradient of the group's variance of reward -
    beta S, halved, whoever sampled it: AGRO (arXiv 2503.19612). A sequence alone in its group has
    no variance, and A = b - S = 0. With baseline soft or value, A is
    the reward less V of the prompt, without b: the gradient of the squared residual. V is the soft
    value from the others of the group: SPO (arXiv 2503.05453); or learnt on the same residual:
    DRO-V (arXiv 2405.19107). With advantage estimator soft_value and baseline none, V is the
    queue's, of samples of the reference.
    """
    segments = tokens.segments
    sums = segments.sum(tokens.with_constant_policy().reference_log_ratios)
    if cfg.baseline == "group":
        sums = sums - segments.mean_of_others(sums, is_own_alone=True)
    return _less_value(tokens) - cfg.temperature * segments.spread(sums)


def cross_entropy(tokens: Tokens, cfg: ShapingConfig) -> Tensor:
    """(q - p) / (1 - p) of a sequence: SPO's loss -(q log p + (1 - q) log(1 - p)).

    q = exp((r - top_reward) / beta) and p = exp((V + beta S - top_reward) / beta). The queue's
    advantage is r - V (advantage estimator soft_value), or r with baseline soft, which for tokens
    of a rewarded reply is its return. A sequence whose p reaches 1 teaches nothing, as in the
    paper: take a top_reward above what can be earned. Source: SPO (arXiv 2503.05453), section 3.2.
    """
    segments, beta = tokens.segments, cfg.temperature
    sums = segments.sum(tokens.with_constant_policy().reference_log_ratios)
    # With baseline soft advantages are rewards, or the replies' returns, which p must not hold.
    rewards = tokens.rewards if tokens.values is None else tokens.advantages
    log_q = ((rewards - cfg.top_reward) / beta).clamp_max(0.0)
    log_p = log_q + segments.spread(sums) - _less_value(tokens) / beta
    slopes = (log_q.exp() - log_p.exp()) / -log_p.expm1()
    return slopes.masked_fill(log_p >= -1e-6 / beta, 0.0)


def _less_value(tokens: Tokens) -> Tensor:
    """[tokens]: the queue's advantages, less the prompt's value where the trainer has one."""
    return tokens.advantages if tokens.values is None else tokens.advantages - tokens.values


def jepo(tokens: Tokens, cfg: ShapingConfig) -> Tensor:
    """Advantages of thoughts by the likelihood of the reference answer, and of that answer.

    l_i: summed logprob of the answer behind thoughts i, LME the log of the mean of exp over a
    group's sequences that have one. Thoughts get A_i = LME(l) - LME(l without i), divided by their
    standard deviation in the minibatch and cut at +-cfg.bound, beside the queue's advantage;
    answers cfg.support * members of the group * exp(l_i) / sum_j exp(l_j): with weights of 1 /
    members, the gradient of LME(l). A group without such answers keeps the queue's advantages.
    Source: JEPO (arXiv 2503.19618), section 4 and appendix B.
    """
    segments = tokens.segments
    gold = segments.sum(tokens.is_gold.to(tokens.logprobs.dtype))
    sums = segments.sum(tokens.logprobs.detach().masked_fill(~tokens.is_gold, 0.0))
    values, has_gold = segments.by_member(sums, gold > 0)
    _, is_member = segments.by_member(sums, segments.group_of >= 0)
    advantages, shares = gold_advantages(values, has_gold)
    listed = advantages[has_gold]
    spread = listed.std(correction=0) if listed.numel() else advantages.new_ones(())
    bounded = (advantages / spread.clamp_min(MIN_STD)).clamp(-cfg.bound, cfg.bound)
    support = cfg.support * shares * is_member.sum(-1, keepdim=True)
    of_thoughts = segments.spread(segments.from_members(bounded, sums))
    of_answers = segments.spread(segments.from_members(support, sums))
    # Padding may have any value: it has no weight.
    return of_answers.where(tokens.is_gold, tokens.advantages + of_thoughts)


jepo.needs_groups = True  # type: ignore[attr-defined]


def gold_advantages(values: Tensor, has_gold: Tensor) -> tuple[Tensor, Tensor]:
    """(A, s), both [groups, members] float64, 0 without a reference answer or with one alone in A.

    values: [groups, members] float64, l_i; A_i = LME(l) - LME(l without i), s = softmax(l).
    """
    listed = values.masked_fill(~has_gold, -math.inf)
    counts = has_gold.double().sum(-1, keepdim=True)
    shares = listed.softmax(-1).where(has_gold, values.new_zeros(()))
    whole = listed.logsumexp(-1, keepdim=True) - counts.log()
    without = log_mean_exp_of_others(values, has_gold)
    is_comparable = has_gold & (counts > 1)
    return (whole - without).where(is_comparable, values.new_zeros(())), shares


SHAPINGS: dict[str, ShapingFunction | None] = {
    "none": None,
    "regression": regression,
    "cross_entropy": cross_entropy,
    "jepo": jepo,
}
