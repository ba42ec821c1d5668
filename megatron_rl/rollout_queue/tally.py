"""Counts and sums over scored rollouts: all that is kept of rollouts that are released. Pure.

Used by the rollout queue.
"""

import collections
from collections.abc import Iterable

from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import ScoredRollout


class RolloutTally:
    """What the metrics of a batch need to know of its rollouts."""

    def __init__(self, rollouts: Iterable[ScoredRollout] = ()) -> None:
        self.count = 0
        self._sums: collections.Counter[str] = collections.Counter()
        self._parts: dict[str, float] = {}
        self._reasons: collections.Counter[str] = collections.Counter()
        self.add(rollouts)

    def add(self, rollouts: Iterable[ScoredRollout]) -> None:
        """Count rollouts in."""
        for scored in rollouts:
            rollout, score = scored.rollout, scored.score
            self.count += 1
            self._reasons[score.reason] += 1
            for part, value in score.parts.items():
                self._parts[part] = self._parts.get(part, 0.0) + value
            self._sums["reward"] += score.reward
            self._sums["correct"] += score.is_correct
            self._sums["format"] += score.is_well_formed
            self._sums["length_tokens"] += len(rollout.token_ids)
            self._sums["truncated"] += rollout.finish_reason == "length"

    def fold(self, other: "RolloutTally") -> None:
        """Count in what another tally has counted."""
        self.count += other.count
        self._sums.update(other._sums)
        self._reasons.update(other._reasons)
        for part, value in other._parts.items():
            self._parts[part] = self._parts.get(part, 0.0) + value

    def metrics(self) -> list[Metric]:
        """Means over all rollouts (0 for a part of the reward that one lacks), and reasons."""
        means = {f"reward/{part}": self._parts[part] for part in sorted(self._parts)}
        names = ("reward", "correct", "format", "length_tokens", "truncated")
        means |= {f"rollout/{name}": self._sums[name] for name in names}
        return [
            *(Metric(name, float(total), "mean", self.count) for name, total in means.items()),
            *(
                Metric(f"reason/{reason}", count, "sum", count)
                for reason, count in self._reasons.items()
            ),
        ]
