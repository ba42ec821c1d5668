"""The numbers of a run's summary, from its metrics; `summary_text.py` has their text.

Used by the launcher. Pure functions of rows of `metrics.jsonl` and of `RunFacts`; a missing number
is None.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.observe.activity_text import ActivityTotals
from megatron_rl.observe.choice import difference_of, summarize_choice
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DROPPED,
    GENERATOR_RESTARTS,
    GROUPS_DROPPED,
    MAJ_AT,
    PASS_AT,
    RESUMED,
    Interval,
    Row,
    begin_of_loop,
    find_stops,
    overlap_s,
    step_before,
)

SFT_BASELINE_TEXT = (
    "instead of RL, the cold start continues, on the same SFT examples, for as much compute as RL "
    "took (counted in tokens: trained ones whole, generated ones a third), and is evaluated alike"
)

REWARD_STEPS = 10
"""Steps at each end of a run over which the reward is averaged."""
_ROUNDING_S = 0.1
"""Seconds by which times of two processes may disagree."""
_OF_STEP = (
    "time", "source", "step", "train/loss", "train/update_s", "train/logprob_gap",
    "train/logprob_gap_tokens", "wait/batch_s", "weight_sync/s", "rollout/reward",
    "queue/rollouts_trained", "queue/rollouts_spanning_versions", "queue/staleness_versions_mean",
    "queue/staleness_versions_max", "environment/turns", "environment/given_tokens",
    "environment/wait_s",
)  # fmt: skip
"""Kept values of a step's row, besides drop counts: long runs have thousands of long rows."""


@dataclass(frozen=True)
class RunFacts:
    """Facts besides the metrics."""

    wall_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, since the latest start of the run."""
    hf_export: str | None = None
    """Exported HF folder."""
    max_staleness: int | None = None
    """The largest `queue.max_staleness` of the run."""
    strict_staleness: bool = False
    """`queue.strict_staleness`."""
    eval_temperature: float = 0.0
    """`eval.temperature`; 0 is greedy."""
    dataset_remark: str = ""
    """`expert.sft.remark`, where there was a cold start."""
    sampled_accuracy: tuple[float | None, float | None] = (None, None)
    """Share of correct rollouts in the first and the last fifth of steps."""
    run_dir: str = ""
    files: tuple[str, ...] = ()
    """Files of the run folder to list."""


def summarize(given: Iterable[Row], facts: RunFacts) -> dict[str, Any]:
    """The content of summary.json. given: rows of the run, without superseded ones."""
    activity, rows = ActivityTotals(), []
    for row in given:
        # Activity rows come every few seconds: too many to keep.
        if not activity.take(row):
            rows.append(_needed_of(row))
    trainer = [row for row in rows if row.get("source") == "trainer"]
    steps = [row for row in trainer if "train/loss" in row]
    start = next((row for row in trainer if "model/parameters" in row), {})
    rewards = [row["rollout/reward"] for row in steps if "rollout/reward" in row]
    return {
        "engine": start.get("engine"),
        "engine_version": start.get("engine_version"),
        "megatron_core_version": start.get("megatron_core_version"),
        "trainer_world_size": start.get("trainer/world_size"),
        "tp": start.get("trainer/tp"),
        "pp": start.get("trainer/pp"),
        "dp": start.get("trainer/dp"),
        "model_parameters": start.get("model/parameters"),
        "steps": len(steps),
        "rollouts_trained": int(sum(_values(steps, "queue/rollouts_trained"))),
        "groups_dropped_zero_variance": int(sum(_values(steps, f"{GROUPS_DROPPED}zero_variance"))),
        "groups_dropped": _dropped(steps, activity, what="groups"),
        "completions_dropped": _dropped(steps, activity, what="completions"),
        "activity": activity.counts(),
        "diagnosis": activity.diagnosis or None,
        **_evaluated(rows),
        "cold_start": summarize_choice(rows),
        "reward_first10": _mean(rewards[:REWARD_STEPS]),
        "reward_last10": _mean(rewards[-REWARD_STEPS:]),
        "sampled_accuracy_first": facts.sampled_accuracy[0],
        "sampled_accuracy_last": facts.sampled_accuracy[1],
        "rollouts_spanning_versions": int(sum(_values(steps, "queue/rollouts_spanning_versions"))),
        "staleness_mean": _weighted_mean(
            steps, "queue/staleness_versions_mean", weight="queue/rollouts_trained"
        ),
        "staleness_max": max(_values(steps, "queue/staleness_versions_max"), default=None),
        "max_staleness": facts.max_staleness,
        **{
            f"{name}_mean": _weighted_mean(
                steps, f"environment/{name}", weight="queue/rollouts_trained"
            )
            for name in ("turns", "given_tokens", "wait_s")
        },
        "logprob_gap_mean": _weighted_mean(
            steps, "train/logprob_gap", weight="train/logprob_gap_tokens"
        ),
        "weight_sync_s_median": _median(_values(trainer, "weight_sync/s")),
        "generator_idle_fraction": generator_idle_fraction(rows),
        "trainer_idle_fraction": trainer_idle_fraction(rows),
        "generator_restarts": int(sum(_values(rows, GENERATOR_RESTARTS))),
        "resumes": sum(RESUMED in row for row in rows) - (step_before(rows) > 0),
        "wall_s": {phase: round(seconds, 1) for phase, seconds in facts.wall_s.items()},
        "hf_export": facts.hf_export,
    }


def _needed_of(row: Row) -> Row:
    if "train/loss" not in row or "model/parameters" in row:
        return row
    dropped = [name for name in row if name.startswith((GROUPS_DROPPED, COMPLETIONS_DROPPED))]
    return {name: row[name] for name in (*_OF_STEP, *dropped) if name in row}


def _evaluated(rows: list[Row]) -> dict[str, Any]:
    """Results of all evaluations, the latest of each label, in order."""
    evaluations: dict[str, Row] = {}
    for row in _evaluations_of_end(rows):
        # A resumed run measures some labels again, such as "after": behind those before them.
        evaluations.pop(row["label"], None)
        evaluations[row["label"]] = row
    held_out = {label: row for label, row in evaluations.items() if "." not in label}
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    baseline = evaluations.get("sft_baseline", {})
    latest = after or before or next(reversed(held_out.values()), {})
    gain, sigmas = difference_of(_measured(baseline), _measured(after))
    return {
        "eval_n": latest.get("eval/n"),
        "eval_not_graded": latest.get("eval/not_graded"),
        "accuracy_before": before.get("eval/accuracy"),
        "accuracy_after": after.get("eval/accuracy"),
        "accuracy_se_before": before.get("eval/accuracy_se"),
        "accuracy_se_after": after.get("eval/accuracy_se"),
        "sft_baseline_accuracy": baseline.get("eval/accuracy"),
        "sft_baseline_se": baseline.get("eval/accuracy_se"),
        "sft_baseline": SFT_BASELINE_TEXT if baseline else None,
        "pass_at": _by_k(evaluations, PASS_AT),
        "maj_at": _by_k(evaluations, MAJ_AT),
        "evaluations": {label: _figures(row) for label, row in held_out.items()},
        "evaluation_sets": {
            label: _figures(row) for label, row in evaluations.items() if label not in held_out
        },
        "rl_minus_sft_baseline": gain,
        "rl_minus_sft_baseline_standard_errors": sigmas,
    }


def _evaluations_of_end(rows: list[Row]) -> list[Row]:
    """Rows of evaluations, without those of an end after which the run was extended.

    There "after" measured an earlier model, and the SFT baseline had the compute of fewer steps.
    """
    steps = [(at, row["step"]) for at, row in enumerate(rows) if _is_step(row)]
    last_at, last_step = max(steps, default=(-1, None))
    found = []
    for at, row in enumerate(rows):
        if "eval/accuracy" not in row:
            continue
        when = row["label"].partition(".")[0]
        # Its rows have step 0. Its phase begins when the trainer has written all steps.
        has_fewer_steps = when == "sft_baseline" and at < last_at
        # The queue may write "after" before the trainer writes the last step.
        is_earlier = when == "after" and last_step is not None and row["step"] != last_step
        if not has_fewer_steps and not is_earlier:
            found.append(row)
    return found


def _figures(row: Row) -> dict[str, Any]:
    accuracy, se = _measured(row)
    found = {"accuracy": accuracy, "se": se, "n": row["eval/n"]}
    return found | ({"reward": row["eval/reward"]} if "eval/reward" in row else {})


def _by_k(evaluations: dict[str, Row], prefix: str) -> dict[str, dict[str, float]]:
    """By label: pass@k or maj@k and their standard errors (k_se), for k > 1."""
    found = {
        label: {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
        for label, row in evaluations.items()
    }
    return {label: by_k for label, by_k in found.items() if by_k}


def _measured(evaluation: Row) -> tuple[Any, Any]:
    return evaluation.get("eval/accuracy"), evaluation.get("eval/accuracy_se")


def _dropped(steps: list[Row], activity: ActivityTotals, *, what: str) -> dict[str, int]:
    """Dropped groups or completions by reason, from steps, or from activity without steps."""
    if not steps:
        return dict(activity.by_reason(f"{what}_dropped"))
    prefix = {"groups": GROUPS_DROPPED, "completions": COMPLETIONS_DROPPED}[what]
    found: Counter[str] = Counter()
    for row in steps:
        for name in row:
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] += int(row[name])
    return dict(+found)


def trainer_idle_fraction(rows: list[Row]) -> float | None:
    """Share of the training loop in which the trainer waited for batches.

    The loop lasts from the weight sync of version 0 to the last step. Evaluations inside it, which
    the trainer must wait for, and the time in which the run was stopped, count neither as waiting
    nor as loop time.
    """
    loop = _loop_interval(rows)
    if loop is None:
        return None
    outside = _outside_intervals(rows)
    waited = 0.0
    for row in _step_rows(rows):
        end, _ = _update_of(row)
        wait = (end - row.get("wait/batch_s", 0.0), end)
        waited += (wait[1] - wait[0]) - overlap_s(wait, outside)
    length = (loop[1] - loop[0]) - overlap_s(loop, outside)
    return min(1.0, max(0.0, waited / length)) if length > 0 else None


def generator_idle_fraction(rows: list[Row]) -> float | None:
    """Share of the training loop in which generators were idle, without evaluations and stops."""
    loop = _loop_interval(rows)
    if loop is None:
        return None
    outside = _outside_intervals(rows)
    idle = busy = 0.0
    for row in rows:
        if "generator/idle_s" not in row or not loop[0] <= row["time"] <= loop[1]:
            continue
        if any(start <= row["time"] <= end for start, end in outside):
            continue
        idle += row["generator/idle_s"]
        busy += row["generator/busy_s"]
    return idle / (idle + busy) if idle + busy > 0 else None


def _update_of(row: Row) -> Interval:
    """When the step was computed. Its row is written at its end, after wait, update and sync."""
    end = row["time"] - row.get("weight_sync/s", 0.0)
    return end - row.get("train/update_s", 0.0), end


def _step_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if _is_step(row)]


def _is_step(row: Row) -> bool:
    return row.get("source") == "trainer" and "train/loss" in row


def _loop_interval(rows: list[Row]) -> Interval | None:
    """(first weight sync, end of the last step), in the rows' time."""
    steps = _step_rows(rows)
    synced = [row for row in rows if row.get("source") == "trainer" and "weight_sync/s" in row]
    if not steps or not synced:
        return None
    return begin_of_loop(synced[0]), steps[-1]["time"]


def _outside_intervals(rows: list[Row]) -> list[Interval]:
    """Evaluations for which the trainer waits, and stops: from the last row before a resume to its
    first weight sync. They do not overlap, and are in order.
    """
    updates = [_update_of(row) for row in _step_rows(rows)]
    evaluations = [
        (row["time"] - row["eval/seconds"], row["time"]) for row in rows if "eval/seconds" in row
    ]
    # Where other engines evaluate (eval.replicas), the trainer does not wait.
    found = find_stops(rows) + [one for one in evaluations if overlap_s(one, updates) < _ROUNDING_S]
    merged: list[Interval] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _weighted_mean(rows: list[Row], name: str, *, weight: str) -> float | None:
    """Mean of the rows' means; rows without a weight have weight 1."""
    pairs = [(row[name], row.get(weight, 1)) for row in rows if name in row]
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None
