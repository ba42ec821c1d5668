"""Which share of the devices' peak a step uses, and how many tokens each device takes a second.

Runs in trainer ranks.
"""

from dataclasses import dataclass
from typing import Self

from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.sequence_cost import SequenceCost, read_cost
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.model.policy import Policy

PASSES = 3
"""A backward pass costs two forward passes; recomputation does not count (arXiv 2204.02311)."""


@dataclass(frozen=True)
class Utilisation:
    """Utilisation of all trainer ranks together."""

    cost: SequenceCost
    ranks: int
    peak_flops: float | None
    """FLOP/s of a rank; None where it is not known."""

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """By the model's sizes and the devices."""
        model = policy.cfg.model
        peak = policy.backend.peak_flops(model)
        return cls(read_cost(model.path), policy.parallel.world_size, peak)

    def flops(self, minibatch: MinibatchShare) -> float:
        """Model FLOPs of an update with these sequences."""
        lengths = [len(s.token_ids) for share in minibatch.microbatches for s in share]
        return float(PASSES * sum(map(self.cost.of, lengths)))

    def metrics(self, *, flops: float, tokens: float, seconds: float) -> list[Metric]:
        """Metrics of an update with this number of FLOPs and positions on all ranks."""
        rank_seconds = seconds * self.ranks
        found = [Metric("train/tokens_per_s_per_gpu", tokens, count=rank_seconds)]
        if self.peak_flops is not None:
            found.append(Metric("train/mfu", flops, count=rank_seconds * self.peak_flops))
        return found
