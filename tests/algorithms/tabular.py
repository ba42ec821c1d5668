"""Tabular policies whose outcomes can all be listed, and a minibatch of all of them.

An estimator's mean is then a sum, and so is the objective whose gradient it should be.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.algorithms.soft_value import soft_values
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.protocol.types import (
    GoldAnswer,
    Rollout,
    Sampling,
    Score,
    ScoredRollout,
    TrainSequence,
    VersionSpan,
)  # fmt: skip
from megatron_rl.rollout_queue.batches import minibatch_sequences
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.trainer.loss_inputs import Prepared, tokens_of, whole_groups
from megatron_rl.trainer.model.collate import collate
from tests.rollout_queue.makers import make_prompt

Outcome = tuple[int, ...]
LIMIT = {"rtol": 0.0, "atol": 1e-6}
"""Of an estimator's mean, which the product computes in float32 in parts."""
SUMMED = {"normalization": {"name": "none"}, "aggregation": {"name": "sequence_sum"}}
"""Of the section [algorithm]: the loss is a mean over sequences of sums over their tokens."""


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
        chosen = torch.tensor(self.outcomes)[..., None]
        return self.distributions(logits).gather(2, chosen)[..., 0]

    def distributions(self, logits: Tensor) -> Tensor:
        """[outcomes, length, vocab] logprobs of all tokens, given those before of the outcome."""
        rows = []
        for outcome in self.outcomes:
            row, first = [], 0
            for place in range(self.length):
                prefix = sum(t * self.vocab**i for i, t in enumerate(reversed(outcome[:place])))
                start = first + prefix * self.vocab
                row.append(logits[start : start + self.vocab].log_softmax(0))
                first += self.vocab ** (place + 1)
            rows.append(torch.stack(row))
        return torch.stack(rows)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[outcomes]."""
        return self.logprobs(logits).sum(1).exp()

    def mean_reward(self, logits: Tensor) -> Tensor:
        return (self.probabilities(logits) * torch.tensor(self.rewards)).sum()

    def kl_of_positions(self, logits: Tensor, reference: Tensor) -> Tensor:
        """[outcomes, length]: KL(policy || reference) of the token at each place of an outcome."""
        own, other = self.distributions(logits), self.distributions(reference)
        return (own.exp() * (own - other)).sum(2)

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


def token_scores(table: Table, logits: Tensor) -> Tensor:
    """[outcomes, length, logits]: gradient of each token's logprob."""
    return torch.autograd.functional.jacobian(table.logprobs, logits)


def expected_gradient(
    table: Table,
    given: dict[str, Any],
    logits: Tensor,
    *,
    group_size: int,
    behaviour: Tensor | None = None,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    gold: int | None = None,
    value: float | None = None,
) -> Tensor:
    """Mean of minus the loss's gradient over all groups that `behaviour` may sample.

    By way of the product: each possible group is one of a minibatch, whose tokens weigh as much
    more as it is likely. given: of the section [algorithm]. gold: reference answer, a last token.
    value: of the prompt, where one is learnt.
    """
    sampled_from = table.logprobs(logits if behaviour is None else behaviour)
    tuples = list(itertools.product(range(len(table.outcomes)), repeat=group_size))
    return _gradient_of_groups(
        table,
        AlgorithmConfig.model_validate(given),
        logits,
        tuples,
        sampled_from.sum(1).exp()[torch.tensor(tuples)].prod(1),
        sampled_from=sampled_from,
        proximal=proximal,
        reference=reference,
        gold=gold,
        value=value,
    )


def sample_gradients(
    table: Table, given: dict[str, Any], logits: Tensor, *, reference: Tensor
) -> Tensor:
    """[outcomes, logits]: minus the gradient of the loss of each outcome, alone in its group."""
    rows = [
        _gradient_of_groups(
            table,
            AlgorithmConfig.model_validate(given),
            logits,
            [(place,)],
            torch.ones(1),
            sampled_from=table.logprobs(logits),
            reference=reference,
        )
        for place in range(len(table.outcomes))
    ]
    return torch.stack(rows)


def _gradient_of_groups(
    table: Table,
    cfg: AlgorithmConfig,
    logits: Tensor,
    tuples: list[Outcome],
    chances: Tensor,
    *,
    sampled_from: Tensor,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    gold: int | None = None,
    value: float | None = None,
) -> Tensor:
    """Sum over groups of their chance times minus the gradient of their loss.

    tuples: the places of each group's outcomes. sampled_from: logprobs [outcomes, length].
    """
    groups = [
        _group(table, number, places, sampled_from, gold) for number, places in enumerate(tuples)
    ]
    sequences = [
        _weighted(sequence, float(chances[sequence.group]) * len(groups))
        for sequence in minibatch_sequences(groups, find_advantage_functions(cfg))
    ]
    batch = collate(sequences)
    places = torch.tensor(tuples).flatten()
    if gold is not None:
        places = places - places % table.vocab + gold
    prepared = Prepared(
        None if proximal is None else table.logprobs(proximal)[places].flatten(),
        None if reference is None else table.logprobs(reference)[places].flatten(),
    )
    objective = find_objective(cfg)
    members = len(tuples[0])
    if cfg.has_soft_value:
        part = tokens_of(batch, torch.zeros(len(batch.weights)), prepared, version=0)
        whole = whole_groups([part], groups=len(groups), members=members, is_alone=True)
        prepared = replace(prepared, soft=soft_values(whole, cfg.shaping.temperature))

    def utility(leaf: Tensor) -> Tensor:
        logprobs = table.logprobs(leaf)[places].flatten()
        kl = None
        if objective.cfg.kl.is_exact:
            kl = table.kl_of_positions(leaf, reference)[places].flatten()
        values = None if value is None else torch.full((len(sequences),), value)
        tokens = tokens_of(batch, logprobs, prepared, version=0, reference_kl=kl, values=values)
        if objective.needs_groups:
            whole = whole_groups([tokens], groups=len(groups), members=members, is_alone=True)
            advantages = objective.advantages(whole)
        else:
            advantages = objective.advantages(tokens)
        return -objective.loss(tokens, advantages, torch.zeros_like(logprobs)).loss

    return gradient(utility, logits)


def _group(table: Table, number: int, places: Outcome, logprobs: Tensor, gold: int | None) -> Group:
    group = Group(number, make_prompt(), Sampling(8, 1.0), len(places), 0)
    group.learns_gold = gold is not None
    answer = None if gold is None else GoldAnswer(table.length - 1, np.array([gold], np.int32))
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
            gold=answer,
        )
        reward = table.rewards[place]
        reason = "correct" if reward == 1.0 else "wrong_answer"
        group.add(ScoredRollout(rollout, Score(reward, {"format": 0.1}, reason)), 0.0)
    group.classes = dict(enumerate(places))
    return group


def _weighted(sequence: TrainSequence, factor: float) -> TrainSequence:
    fields = {name: getattr(sequence, name) for name in sequence.__struct_fields__}
    return TrainSequence(**(fields | {"weight": sequence.weight * factor}))
