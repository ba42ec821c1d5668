"""Train-inference mismatch: how far the generator's logprobs are from the trainer's own. Pure.

Used by trainer ranks on tokens that were sampled under the version being trained from. All results
are sums over tokens, even the histogram behind the quantile, so ranks reduce them by addition.
"""

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.importance_ratio import bounded_exp
from megatron_rl.config.algorithm import PolicyLossConfig
from megatron_rl.protocol.metrics import Metric

QUANTILE = 0.99
BINS = 1024
"""Bins of the histogram; neighbouring edges differ by 2.3 %, which bounds the quantile's error."""
_LEAST_LOG10, _MOST_LOG10 = -8.0, 2.0
_NAMES = ("absolute", "k1", "k2", "k3", "outside", "tokens")
SIZE = len(_NAMES) + BINS


def mismatch_sums(
    trainer: Tensor, generator: Tensor, cfg: PolicyLossConfig, is_counted: Tensor | None = None
) -> Tensor:
    """[SIZE] float64. trainer, generator: [tokens] logprobs of tokens that the generator sampled.

    is_counted: [tokens] bool, which tokens count; None: all.
    k1, k2 and k3 estimate KL(generator || trainer) from r = trainer / generator probability:
    -log r, (log r)^2 / 2 and (r - 1) - log r.
    Source: J. Schulman, "Approximating KL Divergence", 2020.
    """
    log_ratio = trainer.double() - generator.double()
    counted = torch.ones_like(log_ratio) if is_counted is None else is_counted.double()
    if is_counted is not None:
        log_ratio = log_ratio.masked_fill(~is_counted, 0.0)
    ratio = bounded_exp(log_ratio, cfg.max_log_ratio)
    outside = (ratio < 1 - cfg.eps_low) | (ratio > 1 + cfg.eps_high)
    absolute = log_ratio.abs()
    terms = (absolute, -log_ratio, log_ratio**2 / 2, ratio - 1 - log_ratio, outside.double())
    sums = [*(term.sum() for term in terms), counted.sum()]
    return torch.cat([torch.stack(sums), _histogram(absolute, counted)])


def _histogram(absolute: Tensor, counted: Tensor) -> Tensor:
    """[BINS] float64 counts; the outer bins hold values beyond the edges, the last one also NaN."""
    logs = absolute.nan_to_num(nan=math.inf).clamp_min(10**_LEAST_LOG10).log10()
    places = (logs - _LEAST_LOG10) * (BINS / (_MOST_LOG10 - _LEAST_LOG10))
    # bincount would wait for the device. Sums of ones in float64 are the same in any order.
    return counted.new_zeros(BINS).index_add_(0, places.clamp(0, BINS - 1).long(), counted)


def quantile(histogram: Tensor, share: float) -> float:
    """Value below which `share` of the counted differences lie; nan without differences."""
    cumulative = histogram.cumsum(0)
    target = share * float(cumulative[-1])
    if target == 0:
        return math.nan
    place = int(torch.searchsorted(cumulative, torch.tensor(target, dtype=cumulative.dtype)))
    below = float(cumulative[place] - histogram[place])
    within = (target - below) / float(histogram[place])
    return 10 ** (_LEAST_LOG10 + (place + within) * (_MOST_LOG10 - _LEAST_LOG10) / BINS)


def mean_mismatch(sums: Tensor) -> float:
    """Mean |trainer - generator logprob| over all ranks' sums; nan without tokens."""
    values = dict(zip(_NAMES, sums.tolist(), strict=False))
    return values["absolute"] / values["tokens"] if values["tokens"] else math.nan


def mismatch_metrics(sums: Tensor) -> list[Metric]:
    """Metrics of one update from the sums over all ranks; without tokens only their count."""
    values = dict(zip(_NAMES, sums.tolist(), strict=False))
    tokens = values["tokens"]
    count = Metric("train/logprob_gap_tokens", tokens, "sum")
    if not tokens:
        return [count]
    return [
        count,
        Metric("train/logprob_gap", values["absolute"], count=tokens),
        Metric("train/mismatch_p99", quantile(sums[len(_NAMES) :], QUANTILE), "max"),
        Metric("train/mismatch_k1", values["k1"], count=tokens),
        Metric("train/mismatch_k2", values["k2"], count=tokens),
        Metric("train/mismatch_k3", values["k3"], count=tokens),
        Metric("train/mismatch_outside_clip", values["outside"], count=tokens),
    ]
