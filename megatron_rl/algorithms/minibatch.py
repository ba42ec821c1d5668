"""Advantages and weights of a minibatch, from estimator, normalization and aggregation.

Used by the rollout queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megatron_rl.algorithms.advantage_estimators import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    GroupView,
)
from megatron_rl.algorithms.aggregation import AGGREGATIONS, AggregationFunction
from megatron_rl.algorithms.normalization import NORMALIZATIONS, NormalizationFunction
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import find_function

ZeroVarianceOn = Literal["reward", "verdict"]


@dataclass(frozen=True)
class AdvantageFunctions:
    """The functions that give completions advantages and weights."""

    cfg: AlgorithmConfig
    estimator: AdvantageEstimator
    normalization: NormalizationFunction
    aggregation: AggregationFunction

    @property
    def needs_classes(self) -> bool:
        """Whether the advantage estimator reads classes of answers."""
        return bool(getattr(self.estimator, "needs_classes", False))

    @property
    def zero_variance_on(self) -> ZeroVarianceOn:
        """What all completions of a zero-variance group have in common."""
        return getattr(self.estimator, "zero_variance_on", "reward")

    def advantages(self, groups: Sequence[GroupView]) -> list[np.ndarray]:
        """[n] float64 per group."""
        return self.normalize([self.estimate(group) for group in groups])

    def estimate(self, group: GroupView) -> np.ndarray:
        """[n] float64 of a group, not normalized."""
        return self.estimator(group, self.cfg.advantage_estimator)

    def normalize(self, advantages: list[np.ndarray]) -> list[np.ndarray]:
        """The estimates of a minibatch, [n] float64 per group, normalized."""
        return self.normalization(advantages, self.cfg.normalization)

    def weights(self, groups: Sequence[GroupView]) -> list[np.ndarray]:
        """[n] float64 per group: the weight of every token of a completion."""
        return self.aggregation([group.lengths for group in groups], self.cfg.aggregation)


def find_advantage_functions(cfg: AlgorithmConfig) -> AdvantageFunctions:
    """The functions of a configuration. Raises InputError for an unknown name."""
    advantage_functions = AdvantageFunctions(
        cfg,
        find_function(
            ADVANTAGE_ESTIMATORS,
            cfg.advantage_estimator.name,
            key="algorithm.advantage_estimator.name",
        ),
        find_function(NORMALIZATIONS, cfg.normalization.name, key="algorithm.normalization.name"),
        find_function(AGGREGATIONS, cfg.aggregation.name, key="algorithm.aggregation.name"),
    )
    if advantage_functions.zero_variance_on not in get_args(ZeroVarianceOn):
        raise InputError(
            f"algorithm.advantage_estimator.name={cfg.advantage_estimator.name!r}: its attribute "
            f"zero_variance_on is {advantage_functions.zero_variance_on!r}, expected one of "
            f"{get_args(ZeroVarianceOn)}"
        )
    return advantage_functions
