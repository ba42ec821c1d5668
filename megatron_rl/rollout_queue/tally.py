"""Sums over scored rollouts, for the metrics of the next batch."""

import collections
from collections.abc import Iterable

from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import Rollout, ScoredRollout

_OF_TASKS = ("rollout/reward", "rollout/correct", "reason/", "environment/")
"""Metrics that are told of each task, where there are several."""


_UNIT = 1 << 1074
"""Of exact sums: every float is a whole number of 2**-1074, the smallest float."""


def _exact(value: float) -> int:
    """A finite value in 2**-1074: whole numbers add up to the same sum in any order."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (1075 - denominator.bit_length())


class RolloutTally:
    """Counts and sums over scored rollouts, kept after the rollouts are released.

    They do not depend on the order in which rollouts are added: every run rounds alike.
    """

    def __init__(self, rollouts: Iterable[ScoredRollout] = (), task: str = "") -> None:
        self.count = self._conversations = 0
        self._tasks: dict[str, RolloutTally] = {}
        """Of each task by its name."""
        self._counts: collections.Counter[str] = collections.Counter()
        self._sums: collections.Counter[str] = collections.Counter()
        """By metric, in 2**-1074."""
        self._reasons: collections.Counter[str] = collections.Counter()
        self.add(rollouts, task)

    def add(self, rollouts: Iterable[ScoredRollout], task: str = "") -> None:
        """task: of all these rollouts; "": of several, or not to be told apart."""
        rollouts = list(rollouts)
        if task:
            self._tasks.setdefault(task, RolloutTally()).add(rollouts)
        for scored in rollouts:
            rollout, score = scored.rollout, scored.score
            self.count += 1
            self._reasons[score.reason] += 1
            self._sums["rollout/reward"] += _exact(score.reward)
            for part, value in score.parts.items():
                self._sums[f"reward/{part}"] += _exact(value)
            self._counts["correct"] += score.is_correct
            self._counts["format"] += score.is_well_formed
            self._counts["length_tokens"] += rollout.sampled_tokens
            self._counts["truncated"] += rollout.finish_reason == "length"
            if score.is_outcome or rollout.to_grade is not None:
                self._add_conversation(rollout)

    def _add_conversation(self, rollout: Rollout) -> None:
        self._conversations += 1
        self._counts["turns"] += rollout.turns
        self._counts["given_tokens"] += len(rollout.token_ids) - rollout.sampled_tokens
        self._sums["environment/wait_s"] += _exact(rollout.environment_s)
        for turn in rollout.conversation:
            if turn.follows >= 0:
                self._counts["known"] += turn.before
                self._counts["cached"] += turn.cached

    def fold(self, other: "RolloutTally") -> None:
        self.count += other.count
        self._conversations += other._conversations
        self._counts.update(other._counts)
        self._sums.update(other._sums)
        self._reasons.update(other._reasons)
        for task, tally in other._tasks.items():
            self._tasks.setdefault(task, RolloutTally()).fold(tally)

    def metrics(self) -> list[Metric]:
        """Means over all rollouts (a missing part of the reward counts as 0), and reasons.

        With several tasks, the metrics of `_OF_TASKS` follow for each task.
        """
        totals = {name: total / _UNIT for name, total in sorted(self._sums.items())}
        totals.setdefault("rollout/reward", 0.0)
        for name in ("correct", "format", "length_tokens", "truncated"):
            totals[f"rollout/{name}"] = float(self._counts[name])
        for name in ("turns", "given_tokens") if self._conversations else ():
            totals[f"environment/{name}"] = float(self._counts[name])
        known, cached = self._counts["known"], self._counts["cached"]
        return [
            *(Metric(name, total, "mean", self._among(name)) for name, total in totals.items()),
            *(
                Metric(f"reason/{reason}", count, "sum", count)
                for reason, count in sorted(self._reasons.items())
            ),
            *([Metric("environment/cached_share", cached, "mean", known)] if known else []),
            *(
                one._replace(name=f"task/{task}/{one.name}")
                for task, tally in sorted(self._tasks.items())
                if len(self._tasks) > 1
                for one in tally.metrics()
                if one.name.startswith(_OF_TASKS)
            ),
        ]

    def _among(self, name: str) -> int:
        """Number of rollouts of a mean."""
        return self._conversations if name.startswith("environment/") else self.count
