"""KL of the policy's next-token distribution to the reference's, over the whole vocabulary.

Runs in trainer ranks of the last pipeline stage. The trainer keeps the reference's hidden states,
as its logits would be tokens x ids values. `logprobs.py` computes both policies' logits for some
rows at a time, and adds them to the sums.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.backend.products import write_product
from megatron_rl.backend.softmax import pair_sums


@dataclass(frozen=True)
class ReferenceLayer:
    """The reference's output layer and its input for one microbatch."""

    hidden: Tensor  # [tokens, hidden], rows as in the policy's hidden states
    weight: Tensor  # [padded vocabulary / ranks, hidden], this rank's rows

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(self, hidden=self.hidden.to(device), weight=self.weight.to(device))

    def logits(self, span: slice, ids: int, memory: Tensor) -> Tensor:
        """[rows of the span, ids] for this rank's first ids, written to `memory`."""
        rows = self.hidden[span]
        logits = memory[: len(rows)]
        write_product(logits, rows, self.weight[:ids])
        return logits


class Divergences(NamedTuple):
    """KL of each token [tokens] float32, equal on every tensor-parallel rank."""

    kl: Tensor  # nats
    other_log_z: Tensor  # log of the sum of exp(the reference's logit / temperature)


class PolicySums(NamedTuple):
    """The policy's softmax sums, [tokens] float32, over the whole group."""

    maxima: Tensor  # largest logit / temperature
    exps: Tensor  # sum of exp(logit / temperature - maximum)


class DivergenceSums:
    """Sums over this rank's ids, filled span by span; then reduced over the group."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """A rank that holds only padding fills nothing, and adds nothing."""
        lowest = torch.finfo(torch.float32).min
        self._maxima = torch.full((2, tokens), lowest, dtype=torch.float32, device=device)
        self._sums = torch.zeros(2, tokens, dtype=torch.float32, device=device)

    def fill(self, span: slice, logits: Tensor, others: Tensor, temperature: float) -> None:
        """Add some rows. logits: the policy's; others: the reference's, which are overwritten."""
        found = pair_sums(logits, others, temperature)
        self._maxima[:, span] = torch.stack([found.maxima, found.other_maxima])
        self._sums[:, span] = torch.stack([found.gaps, found.other_exps])

    def reduced(self, policy: PolicySums, group: dist.ProcessGroup) -> Divergences:
        """Reduce over the group; policy: the policy's own sums."""
        own, others = self._maxima
        maxima = others.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums = self._sums * torch.stack([own - policy.maxima, others - maxima]).exp()
        dist.all_reduce(sums, group=group)
        gaps, exps = sums
        # Each difference is between numbers of similar size, for accuracy.
        shift = (maxima - policy.maxima) + (exps.log() - policy.exps.log())
        return Divergences(gaps / policy.exps + shift, maxima + exps.log())
