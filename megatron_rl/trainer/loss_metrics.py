"""Sums that losses report, as one vector on every rank, and the metrics made of them.

Used by trainer ranks. docs/algorithms.md says what each metric means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Self

import torch
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.policy_loss import CLIPPED_HIGH, CLIPPED_LOW
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.protocol.metrics import Metric

_ALWAYS = ("loss", "entropy", "tokens", "padded_tokens", "filling")


@dataclass(frozen=True)
class SumsLayout:
    """Which place of a vector holds which sum."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, objective: Objective) -> Self:
        """By the loss of no tokens at all: ranks that compute no loss need the names, too."""
        tokens = _no_tokens()
        result = objective.loss(tokens, tokens.advantages, tokens.advantages)
        return cls((*_ALWAYS, *(name for name in result.sums if name not in _ALWAYS)))

    def stack(self, sums: Mapping[str, Tensor]) -> Tensor:
        """[names] float64."""
        return torch.stack([sums[name].detach().double() for name in self.names])

    def named(self, values: Tensor) -> dict[str, float]:
        """The sums by name."""
        return dict(zip(self.names, values.tolist(), strict=True))


def _no_tokens() -> Tokens:
    none, numbers = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    return Tokens(
        logprobs=none,
        generator_logprobs=none,
        advantages=none,
        rewards=none,
        weights=none,
        is_real=numbers.bool(),
        lags=numbers,
        segments=Segments(numbers, numbers, numbers, numbers),
        is_gold=numbers.bool(),
        proximal_logprobs=none,
        reference_logprobs=none,
        reference_kl=none,
        values=none,
        effective_shares=none,
    )


def loss_metrics(sums: Mapping[str, float]) -> list[Metric]:
    """Metrics of one update from its sums over all ranks."""
    tokens = sums["tokens"]
    low, high = sums.get(CLIPPED_LOW, 0.0), sums.get(CLIPPED_HIGH, 0.0)
    return [
        Metric("train/loss", sums["loss"]),
        Metric("train/clip_fraction", low + high, count=tokens),
        Metric("train/clip_fraction_low", low, count=tokens),
        Metric("train/clip_fraction_high", high, count=tokens),
        Metric("train/entropy_nats", sums["entropy"], count=tokens),
        *_advantage_metrics(sums),
        *_correction_metrics(sums),
        *_reference_metrics(sums),
        *_gold_metrics(sums),
        *(
            Metric(f"train/{name}", value, count=tokens)
            for name, value in sums.items()
            if name not in _KNOWN
        ),
    ]


_KNOWN = {
    *_ALWAYS, CLIPPED_LOW, CLIPPED_HIGH, "advantage", "advantage_square",
    "correction_changed", "behaviour_ratio", "behaviour_ratio_square",
    "reference_k1", "reference_k3", "gold_logprob", "gold_tokens",
}  # fmt: skip


def _advantage_metrics(sums: Mapping[str, float]) -> list[Metric]:
    tokens = sums["tokens"]
    if not tokens:
        return []
    mean, square = sums["advantage"] / tokens, sums["advantage_square"] / tokens
    return [
        Metric("train/advantage_mean", mean),
        Metric("train/advantage_std", sqrt(max(square - mean**2, 0.0))),
    ]


def _correction_metrics(sums: Mapping[str, float]) -> list[Metric]:
    if not sums.get("behaviour_ratio_square"):
        return []
    tokens, ratios = sums["tokens"], sums["behaviour_ratio"]
    # (sum r)^2 / (n sum r^2): 1 where all tokens count the same.
    effective = ratios**2 / (tokens * sums["behaviour_ratio_square"])
    return [
        Metric("train/correction_changed", sums["correction_changed"], count=tokens),
        Metric("train/behaviour_ratio_mean", ratios, count=tokens),
        Metric("train/effective_sample_share", effective),
    ]


def _reference_metrics(sums: Mapping[str, float]) -> list[Metric]:
    if "reference_k1" not in sums:
        return []
    tokens = sums["tokens"]
    return [
        Metric("train/reference_k1", sums["reference_k1"], count=tokens),
        Metric("train/reference_k3", sums["reference_k3"], count=tokens),
    ]


def _gold_metrics(sums: Mapping[str, float]) -> list[Metric]:
    if not sums.get("gold_tokens"):
        return []
    return [
        Metric("train/gold_logprob", sums["gold_logprob"], count=sums["gold_tokens"]),
        Metric("train/gold_tokens", sums["gold_tokens"], "sum"),
    ]
