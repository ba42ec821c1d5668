"""KL of the policy's next-token distribution to the reference's, over the whole vocabulary.

Runs in trainer ranks of the last pipeline stage. The reference's hidden states are kept instead of
its logits, which would be tokens x ids values. `logprobs.py` computes both policies' logits for
some rows at a time, and adds these logits to the sums.
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
    """The reference's output layer and what goes into it, of one microbatch."""

    hidden: Tensor  # [tokens, hidden], rows as in the policy's hidden states
    weight: Tensor  # [padded vocabulary / ranks, hidden], this rank's rows

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(self, hidden=self.hidden.to(device), weight=self.weight.to(device))

    def logits(self, span: slice, ids: int, memory: Tensor) -> Tensor:
        """[rows of the span, ids], this rank's first ids, in that memory."""
        rows = self.hidden[span]
        logits = memory[: len(rows)]
        write_product(logits, rows, self.weight[:ids])
        return logits


class Divergences(NamedTuple):
    """KL of each token [tokens] float32, equal on every tensor-parallel rank."""

    kl: Tensor  # nats
    other_log_z: Tensor  # log of the sum of exp(the reference's logit / temperature)


class PolicySums(NamedTuple):
    """KL of each token [tokens] float32, over the whole group."""

    maxima: Tensor  # largest logit / temperature
    exps: Tensor  # sum of exp(logit / temperature - maximum)


class DivergenceSums:
    """Sums over this rank's ids, which passes fill in; then sums over the group."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """A rank that holds padding alone has no passes, and adds nothing."""
        lowest = torch.finfo(torch.float32).min
        self._maxima = torch.full((2, tokens), lowest, dtype=torch.float32, device=device)
        self._sums = torch.zeros(2, tokens, dtype=torch.float32, device=device)

    def fill(self, span: slice, logits: Tensor, others: Tensor, temperature: float) -> None:
        """By one pass. logits: the policy's; others: the reference's, which are lost."""
        found = pair_sums(logits, others, temperature)
        self._maxima[:, span] = torch.stack([found.maxima, found.other_maxima])
        self._sums[:, span] = torch.stack([found.gaps, found.other_exps])

    def reduced(self, policy: PolicySums, group: dist.ProcessGroup) -> Divergences:
        """Over the group; policy: what is known of the policy alone."""
        own, others = self._maxima
        maxima = others.clone()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        sums = self._sums * torch.stack([own - policy.maxima, others - maxima]).exp()
        dist.all_reduce(sums, group=group)
        gaps, exps = sums
        # Each difference is taken of numbers that are near one another.
        shift = (maxima - policy.maxima) + (exps.log() - policy.exps.log())
        return Divergences(gaps / policy.exps + shift, maxima + exps.log())
