"""Advantages and weights of a minibatch, from estimator, normalization and aggregation.

Used by the rollout queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
_LARGEST = float(np.finfo(np.float32).max)
"""Advantages and weights become float32."""
_SHOWN = 16
"""Values of a group that a message names."""


@dataclass(frozen=True)
class AdvantageFunctions:
    """The functions that give completions advantages and weights."""

    cfg: AlgorithmConfig
    estimator: AdvantageEstimator
    normalization: NormalizationFunction
    aggregation: AggregationFunction

    def __reduce__(self) -> tuple[Any, ...]:
        # A closure cannot be pickled, and the ledger loads only functions of our own modules.
        return find_advantage_functions, (self.cfg,)

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
        """[n] float64 of a group, not normalized. Raises InputError if they are not finite."""
        found = self.estimator(group, self.cfg.advantage_estimator)
        what = f"the prompt {group.prompt_id!r}, whose rewards are"
        return self._checked("advantage_estimator", found, what, group.rewards)

    def normalize(self, advantages: list[np.ndarray]) -> list[np.ndarray]:
        """The estimates of a minibatch, [n] float64 per group, normalized. Raises InputError if
        they are not finite."""
        found = self.normalization(advantages, self.cfg.normalization)
        return self._all_checked("normalization", found, "advantages", advantages)

    def weights(self, groups: Sequence[GroupView]) -> list[np.ndarray]:
        """[n] float64 per group: the weight of every token of a completion. Raises InputError if
        they are not finite."""
        lengths = [group.lengths for group in groups]
        found = self.aggregation(lengths, self.cfg.aggregation)
        return self._all_checked("aggregation", found, "lengths", lengths)

    def _all_checked(
        self, part: str, found: Sequence[Any], what: str, given: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        if len(found) != len(given):
            raise InputError(
                f"{self._key(part)} gives {len(found)} arrays for {len(given)} groups, expected "
                "one array for each group: correct the function"
            )
        return [
            self._checked(part, mine, f"a group whose {what} are", its)
            for mine, its in zip(found, given, strict=True)
        ]

    def _checked(self, part: str, found: Any, what: str, given: np.ndarray) -> np.ndarray:
        """What a function returned for a group, as [n] float64.

        One number that is not finite would spoil the gradient of its whole minibatch.
        """
        expected = f"expected {len(given)} finite numbers, one for each completion"
        if np.shape(found) != given.shape:
            raise InputError(
                f"{self._key(part)} gives the shape {np.shape(found)} for {what} "
                f"{_shown(given)}; {expected}: correct the function"
            )
        values = np.asarray(found, np.float64)
        is_bad = ~(np.abs(values) <= _LARGEST)
        if is_bad.any():
            place = int(np.argmax(is_bad))
            raise InputError(
                f"{self._key(part)} gives {values[place]} for completion {place} of {what} "
                f"{_shown(given)}; {expected}: correct the function or its keys; often it "
                "divides by a standard deviation of 0"
            )
        return values

    def _key(self, part: str) -> str:
        return f"algorithm.{part}.name={getattr(self.cfg, part).name!r}"


def _shown(values: np.ndarray) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return str([float(f"{value:.6g}") for value in values[:_SHOWN]]) + more


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
