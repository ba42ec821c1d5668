"""What a run's latest steps say: its speed, how long it will take, what is not as it should be.

Used by the live view and `megatron-rl status`. Pure.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from megatron_rl.config.tree import Config
from megatron_rl.observe.metrics_table import find
from megatron_rl.protocol.metrics import GROUPS_DROPPED

Row = dict[str, Any]
RECENT = 10
"""Steps that speed and warnings are about."""
_LARGE_GAP_NATS = 0.05
_MANY_ZERO_VARIANCE = 2.0
"""Zero-variance groups for each one that was trained on."""


def step_seconds(steps: Sequence[Row]) -> float | None:
    """Median seconds from one of the latest steps to the next; None of fewer than two."""
    times = [row["time"] for row in steps[-RECENT - 1 :]]
    if len(times) < 2:
        return None
    pairs = zip(times[:-1], times[1:], strict=True)
    return statistics.median(late - early for early, late in pairs)


def warnings_of(steps: Sequence[Row], config: Config) -> dict[str, str]:
    """Metric -> what it is, its limit and what to do, of those beyond their limits lately.

    steps: the trainer's rows, oldest first.
    """
    steps = steps[-RECENT:]
    if not steps:
        return {}

    def median(name: str) -> float:
        return statistics.median([row.get(name, 0.0) for row in steps])

    dropped = f"{GROUPS_DROPPED}zero_variance"
    trained = sum(row.get("queue/groups_trained", 0) for row in steps)
    checks = (
        ("queue/staleness_versions_mean", median("queue/staleness_versions_mean"),
         float(config.queue.max_staleness)),
        ("train/logprob_gap", median("train/logprob_gap"), _LARGE_GAP_NATS),
        (dropped, sum(row.get(dropped, 0) for row in steps), _MANY_ZERO_VARIANCE * trained),
        ("train/skipped_steps", sum(row.get("train/skipped_steps", 0) for row in steps), 0.0),
    )  # fmt: skip
    found = {}
    for name, value, limit in checks:
        documented = find(name)
        if value > limit and documented is not None:
            found[name] = (
                f"{name} is {value:.4g} in the latest {len(steps)} steps, above {limit:.4g}: "
                f"{documented[0].fix}"
            )
    return found


def duration_text(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
