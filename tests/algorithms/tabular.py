"""Tabular policies whose outcomes can all be listed, and a minibatch of all of them.

An estimator's mean is then a sum, and so is the objective whose gradient it should be.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.minibatch import find_crediting
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.protocol.types import (
    Rollout,
    Sampling,
    Score,
    ScoredRollout,
    TrainSequence,
    VersionSpan,
)  # fmt: skip
from megatron_rl.rollout_queue.batches import minibatch_sequences
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.trainer.loss_tokens import Known, tokens_of, whole_groups
from megatron_rl.trainer.model.collate import collate
from tests.rollout_queue.makers import make_prompt

Outcome = tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """Policies of completions of `length` tokens out of `vocab`; each prefix has its own logits."""

    vocab: int
    length: int
    rewards: tuple[float, ...]
    """Of each outcome, in order."""

    @property
    def outcomes(self) -> list[Outcome]:
        return list(itertools.product(range(self.vocab), repeat=self.length))

    @property
    def n_logits(self) -> int:
        return sum(self.vocab**place for place in range(1, self.length + 1))

    def logits(self, seed: int, scale: float = 0.7) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        return scale * torch.randn(self.n_logits, generator=rng, dtype=torch.float64)

    def logprobs(self, logits: Tensor) -> Tensor:
        """[outcomes, length] of each token given those before it."""
        rows = []
        for outcome in self.outcomes:
            row, first = [], 0
            for place, token in enumerate(outcome):
                prefix = sum(t * self.vocab**i for i, t in enumerate(reversed(outcome[:place])))
                start = first + prefix * self.vocab
                row.append(logits[start : start + self.vocab].log_softmax(0)[token])
                first += self.vocab ** (place + 1)
            rows.append(torch.stack(row))
        return torch.stack(rows)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[outcomes]."""
        return self.logprobs(logits).sum(1).exp()

    def mean_reward(self, logits: Tensor) -> Tensor:
        return (self.probabilities(logits) * torch.tensor(self.rewards)).sum()

    def kl(self, logits: Tensor, reference: Tensor) -> Tensor:
        """KL(policy || reference) of whole completions."""
        own, other = self.logprobs(logits).sum(1), self.logprobs(reference).sum(1)
        return (own.exp() * (own - other)).sum()


BANDIT = Table(5, 1, (0.1, 1.0, 0.0, 0.35, 0.8))
PAIRS = Table(3, 2, (0.0, 1.0, 0.1, 0.4, 0.0, 0.9, 1.0, 0.2, 0.6))


def gradient(function: Any, logits: Tensor) -> Tensor:
    """Of a function of the logits."""
    leaf = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf)
    return found


def expected_gradient(
    table: Table,
    given: dict[str, Any],
    logits: Tensor,
    *,
    group_size: int,
    behaviour: Tensor | None = None,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Mean of minus the loss's gradient over all groups that `behaviour` may sample.

    By way of the product: each possible group is one of a minibatch, whose tokens weigh as much
    more as it is likely. given: of the section [algorithm].
    """
    cfg = AlgorithmConfig.model_validate(given)
    behaviour = logits if behaviour is None else behaviour
    sampled_from = table.logprobs(behaviour)
    tuples = list(itertools.product(range(len(table.outcomes)), repeat=group_size))
    groups = [_group(table, number, places, sampled_from) for number, places in enumerate(tuples)]
    chances = sampled_from.sum(1).exp()[torch.tensor(tuples)].prod(1)
    sequences = [
        _weighted(sequence, float(chances[sequence.group]) * len(groups))
        for sequence in minibatch_sequences(groups, find_crediting(cfg))
    ]
    batch = collate(sequences)
    places = torch.tensor(tuples).flatten()
    known = Known(
        None if proximal is None else table.logprobs(proximal)[places].flatten(),
        None if reference is None else table.logprobs(reference)[places].flatten(),
    )
    objective = find_objective(cfg)

    def utility(leaf: Tensor) -> Tensor:
        logprobs = table.logprobs(leaf)[places].flatten()
        tokens = tokens_of(batch, logprobs, known, version=0)
        if objective.needs_groups:
            whole = whole_groups([tokens], groups=len(groups), members=group_size, is_alone=True)
            advantages = objective.advantages(whole)
        else:
            advantages = objective.advantages(tokens)
        return -objective.loss(tokens, advantages, torch.zeros_like(logprobs)).loss

    return gradient(utility, logits)


def _group(table: Table, number: int, places: Outcome, logprobs: Tensor) -> Group:
    group = Group(number, make_prompt(), Sampling(8, 1.0), len(places), 0)
    for index, place in enumerate(places):
        rollout = Rollout(
            0,
            index,
            np.zeros(1, np.int32),
            np.array(table.outcomes[place], np.int32),
            logprobs[place].numpy().astype(np.float32),
            [VersionSpan(0, 0, table.length)],
            "stop",
            "",
        )
        group.add(ScoredRollout(rollout, Score(table.rewards[place], {}, "")), 0.0)
    return group


def _weighted(sequence: TrainSequence, factor: float) -> TrainSequence:
    fields = {name: getattr(sequence, name) for name in sequence.__struct_fields__}
    return TrainSequence(**(fields | {"weight": sequence.weight * factor}))
