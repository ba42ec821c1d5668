"""Metrics of the trainer: sums over ranks, what is made of them, the row of each step.

Runs in trainer ranks; rank 0 writes. docs/metrics.md says what each metric means.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.objective import OWN_SUMS, Objective
from megatron_rl.algorithms.policy_loss import CLIPPED_HIGH, CLIPPED_LOW
from megatron_rl.algorithms.soft_value import SoftValues
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.metrics import JsonlWriter, Metric, MetricSet, Reduce
from megatron_rl.protocol.sequence_cost import SequenceCost, read_cost
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.loss_inputs import Prepared, tokens_of
from megatron_rl.trainer.model.collate import collate
from megatron_rl.trainer.model.policy import Policy

log = logging.getLogger(__name__)
_DIGITS = 12
_SHOWN = (
    "rollout/reward",
    "rollout/correct",
    "train/loss",
    "train/grad_norm",
    "wait/batch_s",
    "train/update_s",
)


class StepMetrics:
    """Reduces the metrics of one step; `flush` writes a row and a log line."""

    def __init__(self, path: Path, source: str, *, limit_s: float = 0.0) -> None:
        """limit_s: how long a full disk is waited for."""
        self._set = MetricSet()
        is_writer = dist.get_rank() == 0
        self._writer = JsonlWriter(path, source, limit_s=limit_s) if is_writer else None

    def write_start(self, facts: dict[str, str | int]) -> None:
        """Write the first row, with facts about the run."""
        if self._writer is not None:
            self._writer.write(-1, dict(facts))

    def add(self, metrics: Iterable[Metric]) -> None:
        """Add metrics of this process."""
        self._set.add(metrics)

    def add_entries(self, entries: dict[str, tuple[float, float, Reduce]]) -> None:
        """Add metrics of another process."""
        self._set.add_entries(entries)

    def flush(self, step: int, metrics: Iterable[Metric] = ()) -> None:
        """Write the row of `step`, and forget its metrics."""
        self._set.add(metrics)
        values = self._set.values()
        self._set.clear()
        if self._writer is None:
            return
        self._writer.write(step, {name: _rounded(value) for name, value in values.items()})
        shown = (f"{name} {values[name]:.4g}" for name in _SHOWN if name in values)
        log.info("step %d: %s", step, ", ".join(shown))


def _rounded(value: float) -> float:
    """To significant digits, not decimals: a learning rate of 1e-9 stays non-zero."""
    return float(f"{value:.{_DIGITS}g}")


_ALWAYS = ("loss", "entropy", "tokens", "padded_tokens", "filling")


@dataclass(frozen=True)
class SumsLayout:
    """The order of an objective's sums in a vector; equal on all ranks."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, objective: Objective) -> Self:
        """By the loss of a placeholder: ranks that compute no loss need the names, too."""
        none = torch.zeros(1)
        prepared = Prepared(none, none, soft=SoftValues(none, none))
        tokens = tokens_of(collate([]), none, prepared, version=0, reference_kl=none)
        result = objective.loss(tokens, none, none)
        return cls((*_ALWAYS, *(name for name in result.sums if name not in _ALWAYS)))

    def stack(self, sums: Mapping[str, Tensor]) -> Tensor:
        """[names] float64. Raises InputError for a user's policy loss whose names change."""
        if lacking := [name for name in self.names if name not in sums]:
            raise InputError(
                f"algorithm.policy_loss reported no sums[{lacking[0]!r}] for these tokens, but did "
                "for others: report the same names in every call, a zero where there is nothing"
            )
        return torch.stack([sums[name].detach().double() for name in self.names])

    def named(self, values: Tensor) -> dict[str, float]:
        """The sums by name."""
        return dict(zip(self.names, values.tolist(), strict=True))


def loss_metrics(sums: Mapping[str, float]) -> list[Metric]:
    """Metrics of one update from its sums over all ranks.

    A sum without a rule of its own becomes `train/NAME`, per token.
    """
    tokens = sums["tokens"]
    low, high = sums.get(CLIPPED_LOW, 0.0), sums.get(CLIPPED_HIGH, 0.0)
    metrics = [
        Metric("train/loss", sums["loss"]),
        Metric("train/clip_fraction", low + high, count=tokens),
        Metric("train/clip_fraction_low", low, count=tokens),
        Metric("train/clip_fraction_high", high, count=tokens),
        Metric("train/entropy_nats", sums["entropy"], count=tokens),
    ]
    if tokens:
        mean, square = sums["advantage"] / tokens, sums["advantage_square"] / tokens
        metrics += [
            Metric("train/advantage_mean", mean),
            Metric("train/advantage_std", sqrt(max(square - mean**2, 0.0))),
        ]
    if sums.get("behaviour_ratio_square"):
        ratios = sums["behaviour_ratio"]
        # (sum r)^2 / (n sum r^2): 1 where all tokens count the same.
        effective = ratios**2 / (tokens * sums["behaviour_ratio_square"])
        metrics += [
            Metric("train/correction_changed", sums["correction_changed"], count=tokens),
            Metric("train/behaviour_ratio_mean", ratios, count=tokens),
            Metric("train/effective_sample_share", effective),
        ]
    if sums.get("gold_tokens"):
        metrics += [
            Metric("train/gold_logprob", sums["gold_logprob"], count=sums["gold_tokens"]),
            Metric("train/gold_tokens", sums["gold_tokens"], "sum"),
        ]
    others = (name for name in sums if name not in _WITH_A_RULE)
    return metrics + [Metric(f"train/{name}", sums[name], count=tokens) for name in others]


_WITH_A_RULE = {*OWN_SUMS, CLIPPED_LOW, CLIPPED_HIGH}

PASSES = 3
"""A backward pass costs two forward passes; recomputation does not count (arXiv 2204.02311)."""


@dataclass(frozen=True)
class Utilisation:
    """Model FLOPs utilisation (MFU) and tokens per second and device, over all trainer ranks."""

    cost: SequenceCost
    ranks: int
    peak_flops: float | None
    """FLOP/s of a rank; None: unknown."""

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """From the model's sizes and the devices."""
        model = policy.cfg.model
        peak = policy.backend.peak_flops(model)
        return cls(read_cost(model.path), policy.parallel.world_size, peak)

    def flops(self, minibatch: MinibatchShare) -> float:
        """Model FLOPs of an update with these sequences."""
        lengths = [
            end - start for share in minibatch.microbatches for s in share for start, end in s.rows
        ]
        return float(PASSES * sum(map(self.cost.of, lengths)))

    def metrics(self, *, flops: float, tokens: float, seconds: float) -> list[Metric]:
        """Metrics of an update; flops, tokens: over all ranks."""
        rank_seconds = seconds * self.ranks
        found = [Metric("train/tokens_per_s_per_gpu", tokens, count=rank_seconds)]
        if self.peak_flops is not None:
            found.append(Metric("train/mfu", flops, count=rank_seconds * self.peak_flops))
        return found
