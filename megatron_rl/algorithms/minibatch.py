"""Advantages and weights of a minibatch: credit, normalization and aggregation put together.

Used by the rollout queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megatron_rl.algorithms.aggregation import AGGREGATIONS, AggregationFunction
from megatron_rl.algorithms.credit import CREDITS, CreditFunction, GroupView
from megatron_rl.algorithms.normalization import NORMALIZATIONS, NormalizationFunction
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import find_function

FlatOn = Literal["reward", "verdict"]


@dataclass(frozen=True)
class Crediting:
    """How completions are valued and weighed."""

    cfg: AlgorithmConfig
    credit: CreditFunction
    normalization: NormalizationFunction
    aggregation: AggregationFunction

    @property
    def needs_classes(self) -> bool:
        """Whether the credit reads which answers are the same."""
        return bool(getattr(self.credit, "needs_classes", False))

    @property
    def flat_on(self) -> FlatOn:
        """What all completions of a flat group have in common."""
        return getattr(self.credit, "flat_on", "reward")

    def advantages(self, groups: Sequence[GroupView]) -> list[np.ndarray]:
        """Of each group [n] float64."""
        credits = [self.credit(group, self.cfg.credit) for group in groups]
        return self.normalization(credits, self.cfg.normalization)

    def weights(self, groups: Sequence[GroupView]) -> list[np.ndarray]:
        """Of each group [n] float64: what every token of a completion weighs."""
        return self.aggregation([group.lengths for group in groups], self.cfg.aggregation)


def find_crediting(cfg: AlgorithmConfig) -> Crediting:
    """Of a configuration. Raises InputError for a name that stands for nothing."""
    crediting = Crediting(
        cfg,
        find_function(CREDITS, cfg.credit.name, key="algorithm.credit.name"),
        find_function(NORMALIZATIONS, cfg.normalization.name, key="algorithm.normalization.name"),
        find_function(AGGREGATIONS, cfg.aggregation.name, key="algorithm.aggregation.name"),
    )
    if crediting.flat_on not in get_args(FlatOn):
        raise InputError(
            f"algorithm.credit.name={cfg.credit.name!r}: its attribute flat_on is "
            f"{crediting.flat_on!r}, expected one of {get_args(FlatOn)}"
        )
    return crediting
