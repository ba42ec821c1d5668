"""Figures of tools.bench.end_to_end from the steps of training loops. Pure functions.

A loop is a list of `StepMark`s of any trainer.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WARMUP_STEPS = 3
"""First steps that rates exclude: allocators, caches and the asynchronous pipeline fill up."""
ACCURACY_WINDOW_STEPS = 3
ACCURACY_GOAL = 0.7

GROUP_SIZE = 8
"""Rollouts of a prompt in the workload real."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the workload real; TRL (the peer) takes minutes per step."""

    groups: int
    """Groups of 8 rollouts per step."""
    max_new_tokens: int
    steps: int
    """Optimizer steps."""
    skip: int
    """Steps before the clock starts."""
    peer_steps: int
    peer_skip: int
    repeats: int
    """Runs of ours; the other variants run once."""


@dataclass(frozen=True)
class StepMark:
    """One optimizer step of a training loop."""

    seconds: float
    """Wall clock from the loop's start to the end of the step."""
    generated: int
    """Consumed rollouts, dropped zero-variance groups included."""
    trained: int
    """Rollouts in the loss."""
    accuracy: float
    """Share of right answers among the generated rollouts."""
    tokens: int = 0
    """Completion tokens in the loss."""
    waited_s: float = 0.0
    """Wait for the batch since the previous step."""
    turns: float = 1.0
    """Replies of the policy per generated rollout."""


Loops = Mapping[str, Sequence[Sequence[StepMark]]]
"""Repeats by variant."""


def marks_from_metrics(rows: Sequence[dict[str, Any]], group_size: int) -> list[StepMark]:
    """Steps of one of our runs from the rows of its metrics.jsonl.

    The loop starts at the sync of version 0: the trainer's row with `weight_sync/s` before any
    step. Raises ValueError when that row is missing.
    """
    trainer = [row for row in rows if row.get("source") == "trainer"]
    start_s = next(
        (row["time"] for row in trainer if "weight_sync/s" in row and "train/loss" not in row), None
    )
    if start_s is None:
        raise ValueError("the metrics hold no weight sync of version 0")
    return [_mark(row, start_s, group_size) for row in trainer if "train/loss" in row]


def _mark(row: dict[str, Any], start_s: float, group_size: int) -> StepMark:
    trained = int(row["queue/rollouts_trained"])
    return StepMark(
        seconds=row["time"] - start_s,
        generated=trained + group_size * int(row["queue/groups_dropped_zero_variance"]),
        trained=trained,
        accuracy=row["rollout/correct"],
        tokens=round(trained * row.get("rollout/length_tokens", 0)),
        waited_s=row.get("wait/batch_s", 0.0),
        turns=row.get("environment/turns", 1.0),
    )


def marks_from_peer(rows: Sequence[dict[str, Any]]) -> list[StepMark]:
    """Steps of a TRL run from the rows of its worker; TRL trains on every rollout."""
    return [
        StepMark(
            row["seconds"],
            row["rollouts"],
            row["rollouts"],
            row["accuracy"],
            sum(row.get("lengths", [])),
            turns=row.get("turns", 1.0),
        )
        for row in rows
    ]


def rollouts_per_s(
    marks: Sequence[StepMark], *, only_trained: bool = False, skip: int = WARMUP_STEPS
) -> float:
    """Rollouts/s after the first `skip` steps. Raises ValueError when no step is left."""
    if len(marks) <= skip or skip < 1:
        raise ValueError(f"{len(marks)} steps are too few to leave out the first {skip}")
    counted = sum(mark.trained if only_trained else mark.generated for mark in marks[skip:])
    return counted / (marks[-1].seconds - marks[skip - 1].seconds)


def tokens_per_s(marks: Sequence[StepMark], skip: int) -> float:
    """Trained completion tokens/s after the first `skip` steps."""
    seconds = marks[-1].seconds - marks[skip - 1].seconds
    return sum(mark.tokens for mark in marks[skip:]) / seconds


def overlap_bound(marks: Sequence[StepMark], skip: int) -> float:
    """Speed-up of a synchronous loop if waiting and work overlapped perfectly.

    Each step then takes the longer of its two parts, each as fast as alone.
    """
    taken = [b.seconds - a.seconds for a, b in zip(marks[skip - 1 :], marks[skip:], strict=False)]
    longer = [
        max(mark.waited_s, seconds - mark.waited_s)
        for mark, seconds in zip(marks[skip:], taken, strict=True)
    ]
    return sum(taken) / sum(longer)


def seconds_to_accuracy(marks: Sequence[StepMark], goal: float = ACCURACY_GOAL) -> float | None:
    """End of the first step with accuracy `goal` over the last steps of the window; else None."""
    for end in range(ACCURACY_WINDOW_STEPS, len(marks) + 1):
        recent = marks[end - ACCURACY_WINDOW_STEPS : end]
        if _accuracy(recent) >= goal:
            return recent[-1].seconds
    return None


def median_seconds(times_s: Sequence[float | None]) -> float | None:
    """Median with None as infinity; None when the median is infinite."""
    ordered = sorted(float("inf") if seconds is None else seconds for seconds in times_s)
    middle = statistics.median(ordered)
    return None if middle == float("inf") else middle


def compare_tiny(loops: Loops) -> dict[str, Any]:
    """Figures of the workload tiny: medians over the repeats, and their ratios."""
    rates = {name: [rollouts_per_s(marks) for marks in runs] for name, runs in loops.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "rollouts_per_s": median,
        "rollouts_per_s_repeats": rates,
        "rollouts_trained_per_s": {
            name: statistics.median(rollouts_per_s(marks, only_trained=True) for marks in runs)
            for name, runs in loops.items()
        },
        "over_sync": median["ours"] / median["ours_sync"],
        "over_sync_bound": median_bound(loops["ours_sync"], WARMUP_STEPS),
        "over_trl": median["ours"] / max(median["trl_1thread"], median["trl_2threads"]),
        "over_trl_1thread": median["ours"] / median["trl_1thread"],
    }


def median_bound(runs: Sequence[Sequence[StepMark]], skip: int) -> float:
    """Median of `overlap_bound` over synchronous runs."""
    return statistics.median(overlap_bound(marks, skip) for marks in runs)


def turns_per_rollout(loops: Loops) -> dict[str, float]:
    """By variant: mean replies of the policy per generated rollout, over all steps and repeats."""
    return {
        name: sum(mark.turns * mark.generated for marks in runs for mark in marks)
        / sum(mark.generated for marks in runs for mark in marks)
        for name, runs in loops.items()
    }


def learning(loops: Loops) -> dict[str, Any]:
    """By variant: median seconds to ACCURACY_GOAL, and the first and last accuracy."""
    size = ACCURACY_WINDOW_STEPS
    return {
        f"seconds_to_accuracy_{ACCURACY_GOAL}": {
            name: median_seconds([seconds_to_accuracy(marks) for marks in runs])
            for name, runs in loops.items()
        },
        "accuracy_first_last": {
            name: [
                _accuracy([mark for run in runs for mark in run[window]])
                for window in (slice(size), slice(-size, None))
            ]
            for name, runs in loops.items()
        },
    }


def _accuracy(marks: Sequence[StepMark]) -> float:
    return sum(mark.accuracy * mark.generated for mark in marks) / sum(
        mark.generated for mark in marks
    )


def compare_real(loops: Loops, peaks: dict[str, int], scale: Scale) -> dict[str, Any]:
    """Figures of the workload real: medians over the repeats, and their ratios."""
    skips = {name: scale.peer_skip if name == "trl" else scale.skip for name in loops}
    repeats = {
        name: [tokens_per_s(marks, skips[name]) for marks in runs] for name, runs in loops.items()
    }
    tokens = {name: statistics.median(values) for name, values in repeats.items()}
    rollouts = {
        name: statistics.median(rollouts_per_s(marks, skip=skips[name]) for marks in runs)
        for name, runs in loops.items()
    }
    return {
        "tokens_per_s": tokens,
        "tokens_per_s_repeats": repeats,
        "step_s": {name: scale.groups * GROUP_SIZE / rate for name, rate in rollouts.items()},
        "over_trl": tokens["ours"] / tokens["trl"],
        "over_sync": tokens["ours"] / tokens["ours_sync"],
        "over_sync_bound": median_bound(loops["ours_sync"], scale.skip),
        "over_trl_rollouts": rollouts["ours"] / rollouts["trl"],
        "over_sync_rollouts": rollouts["ours"] / rollouts["ours_sync"],
        "peak_memory_bytes": peaks,
        "peak_memory_over_trl": peaks["ours"] / peaks["trl"],
    }


def spread(lengths: Sequence[int]) -> dict[str, float]:
    """Percentiles of the completion lengths, and p90 over p10."""
    deciles = statistics.quantiles(lengths, n=10)
    p10, p50, p90 = deciles[0], deciles[4], deciles[8]
    return {"p10": p10, "p50": p50, "p90": p90, "p90_over_p10": p90 / p10}
