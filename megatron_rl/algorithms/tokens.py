"""The inputs of a loss: completion tokens with their logprobs, sequences and groups.

Used by trainer ranks; all context ranks have the same whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Tokens by sequence and sequences by group. Sequences are whole, and lie end to end."""

    sequence_of: Tensor  # [tokens] int64: which sequence, from 0
    ends: Tensor  # [sequences] int64: one after the last token of each
    group_of: Tensor  # [sequences] int64: which group of the minibatch; -1: padding
    member_of: Tensor  # [sequences] int64: place in its group
    groups: int = 0
    """Of the whole minibatch."""
    members: int = 0
    """Places of a group."""
    add_up: Callable[[Tensor], Tensor] | None = None
    """Sums over the ranks that share the groups; None: this rank has all groups."""

    def sum(self, values: Tensor) -> Tensor:
        """[tokens] -> [sequences], differentiable."""
        return values.new_zeros(len(self.ends)).index_add(0, self.sequence_of, values)

    def lengths(self, like: Tensor) -> Tensor:
        """[sequences] in the dtype of `like`: tokens of each."""
        return like.new_zeros(len(self.ends)).index_add(
            0, self.sequence_of, like.new_ones(len(self.sequence_of))
        )

    def mean(self, values: Tensor) -> Tensor:
        """[tokens] -> [sequences], differentiable."""
        return self.sum(values) / self.lengths(values)

    def spread(self, values: Tensor) -> Tensor:
        """[sequences] -> [tokens]: the value of each token's sequence."""
        return values[self.sequence_of]

    def to_go(self, values: Tensor) -> Tensor:
        """[tokens] -> [tokens]: sum from each token to the end of its sequence."""
        # Each round doubles the tokens in a sum. cumsum on CUDA adds in no fixed order, and a
        # difference of its results would hold rounding of other sequences.
        count = len(values)
        left = self.ends[self.sequence_of] - self.sequence_of.new_ones(count).cumsum(0)
        sums, reach = values.double(), 1
        while reach < count:
            sums = sums + sums.roll(-reach).masked_fill(left < reach, 0.0)
            reach *= 2
        return sums.to(values.dtype)

    def mean_of_others(self, values: Tensor, *, is_own_alone: bool = False) -> Tensor:
        """[sequences] -> [sequences]: mean of the values of the other members of the group.

        Without others it is 0, or with `is_own_alone` the sequence's own value. Not differentiable.
        Only where whole groups are known: in a shaping with `needs_groups`.
        """
        is_real = self.group_of >= 0
        table, is_there = self.by_member(values, is_real)
        sums, counts = table.sum(-1, keepdim=True), is_there.sum(-1, keepdim=True)
        means = (sums - table) / (counts - 1).clamp_min(1)
        if is_own_alone:
            means = table.where(counts == 1, means)
        return self.from_members(means, values).where(is_real, values.detach())

    def by_member(self, values: Tensor, is_listed: Tensor) -> tuple[Tensor, Tensor]:
        """[groups, members] float64 of the listed sequences, 0 elsewhere; and bool: is listed.

        values: [sequences]; not differentiable. is_listed: [sequences] bool, without padding. Only
        where whole groups are known: in a shaping with `needs_groups`.
        """
        assert self.groups, "groups are known to shapings with needs_groups alone"
        places = (self.group_of[is_listed], self.member_of[is_listed])
        table = values.new_zeros(2, self.groups, self.members).double()
        table[0][places] = values.detach()[is_listed].double()
        table[1][places] = 1.0
        if self.add_up is not None:
            table = self.add_up(table)
        return table[0], table[1] > 0

    def from_members(self, table: Tensor, like: Tensor) -> Tensor:
        """[sequences] in the dtype of `like` from [groups, members]; of padding, any."""
        return table[self.group_of, self.member_of].to(like.dtype)


@dataclass(frozen=True)
class Tokens:
    """Completion tokens of sequences, end to end. All [tokens] float32 unless noted."""

    logprobs: Tensor  # of the policy in training, differentiable
    generator_logprobs: Tensor  # of the policy that sampled
    advantages: Tensor
    rewards: Tensor  # of the token's sequence
    weights: Tensor  # in the loss
    is_real: Tensor  # bool: not padding
    lags: Tensor  # int64: versions between sampling and training
    segments: Segments
    is_gold: Tensor  # bool: of a reference answer, which no policy sampled
    proximal_logprobs: Tensor | None = None  # of the policy before the batch's first update
    reference_logprobs: Tensor | None = None
    reference_kl: Tensor | None = None
    """KL(policy || reference) of the token's position over the whole vocabulary, in nats,
    differentiable; 0 for padding and reference answers. None unless algorithm.kl is exact."""
    values: Tensor | None = None
    """Value of the token's prompt: the expected reward; constant. None unless
    algorithm.shaping.baseline is value or soft."""
    effective_shares: Tensor | None = None
    """Of the token's group, from soft_value.py. None unless the baseline is soft."""

    @property
    def old_logprobs(self) -> Tensor:
        """Of the old policy of importance ratios: proximal if computed, else the generator's."""
        proximal = self.proximal_logprobs
        return self.generator_logprobs if proximal is None else proximal

    @property
    def reference_log_ratios(self) -> Tensor:
        """log(policy / reference), differentiable; 0 for padding and reference answers."""
        assert self.reference_logprobs is not None, "algorithm.reference.policy is none"
        return (self.logprobs - self.reference_logprobs).masked_fill(
            ~self.is_real | self.is_gold, 0.0
        )

    def with_constant_policy(self) -> Tokens:
        """The same, not differentiable."""
        kl = self.reference_kl
        constant_kl = None if kl is None else kl.detach()
        return replace(self, logprobs=self.logprobs.detach(), reference_kl=constant_kl)
