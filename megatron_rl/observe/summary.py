"""The summary of a run: numbers from its metrics, and their text.

Used by the launcher. Pure functions of rows of `metrics.jsonl` and of `RunFacts`; a missing number
is None.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.observe.activity_text import ActivityTotals, groups_text, rollouts_text
from megatron_rl.observe.choice import (
    choice_lines,
    difference_of,
    difference_text,
    summarize_choice,
)
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DROPPED,
    GENERATOR_RESTARTS,
    GROUPS_DROPPED,
    MAJ_AT,
    PASS_AT,
)
from megatron_rl.rollout_queue.diagnosis import reasons_text

Row = dict[str, Any]
Interval = tuple[float, float]

SFT_BASELINE_TEXT = (
    "instead of RL, the cold start continues, on the same SFT examples, for as much compute as RL "
    "took (counted in tokens: trained ones whole, generated ones a third), and is evaluated alike"
)


_OF_STEP = (
    "time", "source", "step", "train/loss", "train/update_s", "train/logprob_gap",
    "train/logprob_gap_tokens", "wait/batch_s", "weight_sync/s", "rollout/reward",
    "queue/rollouts_trained", "queue/rollouts_spanning_versions", "queue/staleness_versions_mean",
    "queue/staleness_versions_max",
)  # fmt: skip
"""Kept values of a step's row, besides drop counts: long runs have thousands of long rows."""


@dataclass(frozen=True)
class RunFacts:
    """Facts besides the metrics."""

    wall_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    hf_export: str | None = None
    """Exported HF folder."""
    max_staleness: int | None = None
    """`queue.max_staleness`."""
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
        "reward_first10": _mean(rewards[:10]),
        "reward_last10": _mean(rewards[-10:]),
        "sampled_accuracy_first": facts.sampled_accuracy[0],
        "sampled_accuracy_last": facts.sampled_accuracy[1],
        "rollouts_spanning_versions": int(sum(_values(steps, "queue/rollouts_spanning_versions"))),
        "staleness_mean": _weighted_mean(
            steps, "queue/staleness_versions_mean", weight="queue/rollouts_trained"
        ),
        "staleness_max": max(_values(steps, "queue/staleness_versions_max"), default=None),
        "max_staleness": facts.max_staleness,
        "logprob_gap_mean": _weighted_mean(
            steps, "train/logprob_gap", weight="train/logprob_gap_tokens"
        ),
        "weight_sync_s_median": _median(_values(trainer, "weight_sync/s")),
        "generator_idle_fraction": generator_idle_fraction(rows),
        "trainer_idle_fraction": trainer_idle_fraction(rows),
        "generator_restarts": int(sum(_values(rows, GENERATOR_RESTARTS))),
        "wall_s": {phase: round(seconds, 1) for phase, seconds in facts.wall_s.items()},
        "hf_export": facts.hf_export,
    }


def _needed_of(row: Row) -> Row:
    if "train/loss" not in row or "model/parameters" in row:
        return row
    dropped = [name for name in row if name.startswith((GROUPS_DROPPED, COMPLETIONS_DROPPED))]
    return {name: row[name] for name in (*_OF_STEP, *dropped) if name in row}


def _evaluated(rows: list[Row]) -> dict[str, Any]:
    """Results before and after training, and of the SFT baseline."""
    evaluations = {row["label"]: row for row in rows if "eval/accuracy" in row}
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    baseline = evaluations.get("sft_baseline", {})
    gain, sigmas = difference_of(_measured(baseline), _measured(after))
    return {
        "eval_n": (after or before).get("eval/n"),
        "eval_not_graded": (after or before).get("eval/not_graded"),
        "accuracy_before": before.get("eval/accuracy"),
        "accuracy_after": after.get("eval/accuracy"),
        "accuracy_se_before": before.get("eval/accuracy_se"),
        "accuracy_se_after": after.get("eval/accuracy_se"),
        "sft_baseline_accuracy": baseline.get("eval/accuracy"),
        "sft_baseline_se": baseline.get("eval/accuracy_se"),
        "sft_baseline": SFT_BASELINE_TEXT if baseline else None,
        "pass_at": _by_k(evaluations, PASS_AT),
        "maj_at": _by_k(evaluations, MAJ_AT),
        "evaluation_sets": {
            label: {"accuracy": row["eval/accuracy"], "se": row["eval/accuracy_se"]}
            | {"n": row["eval/n"]}
            for label, row in evaluations.items()
            if "." in label
        },
        "rl_minus_sft_baseline": gain,
        "rl_minus_sft_baseline_standard_errors": sigmas,
    }


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
    the trainer must wait for, count neither as waiting nor as loop time.
    """
    loop = _loop_interval(rows)
    if loop is None:
        return None
    evaluations = _evaluation_intervals(rows)
    waited = 0.0
    for row in _step_rows(rows):
        # A step's row is written at its end, after wait, update and sync.
        end = row["time"] - row.get("train/update_s", 0.0) - row.get("weight_sync/s", 0.0)
        wait = (end - row.get("wait/batch_s", 0.0), end)
        waited += (wait[1] - wait[0]) - _overlap(wait, evaluations)
    length = (loop[1] - loop[0]) - _overlap(loop, evaluations)
    return min(1.0, max(0.0, waited / length)) if length > 0 else None


def generator_idle_fraction(rows: list[Row]) -> float | None:
    """Share of the training loop in which generators were idle, without evaluations."""
    loop = _loop_interval(rows)
    if loop is None:
        return None
    evaluations = _evaluation_intervals(rows)
    idle = busy = 0.0
    for row in rows:
        if "generator/idle_s" not in row or not loop[0] <= row["time"] <= loop[1]:
            continue
        if any(start <= row["time"] <= end for start, end in evaluations):
            continue
        idle += row["generator/idle_s"]
        busy += row["generator/busy_s"]
    return idle / (idle + busy) if idle + busy > 0 else None


def render_text(summary: dict[str, Any], facts: RunFacts) -> str:
    """The text at the end of a run: numbers with standard errors, and paths."""
    lines = [*_accuracy_lines(summary, facts), "", *choice_lines(summary.get("cold_start"))]
    lines += [*_training_lines(summary, facts), ""]
    if restarts := summary.get("generator_restarts"):
        lines.append(f"Generators          died and were restarted {restarts} times")
    wall = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in summary["wall_s"].items())
    if wall:
        lines.append(f"Time                {wall}")
    lines.append(f"Trained model       {summary['hf_export'] or 'none was exported'}")
    if facts.files:
        lines.append(f"Everything else     {facts.run_dir}: {', '.join(facts.files)}")
    return "\n".join(lines)


def _accuracy_lines(summary: dict[str, Any], facts: RunFacts) -> list[str]:
    if summary["accuracy_before"] is None and summary["accuracy_after"] is None:
        return _set_lines(summary) or ["No evaluation was made."]
    how = "greedy" if facts.eval_temperature == 0 else f"sampled, T={facts.eval_temperature:g}"
    before = summary["accuracy_before"], summary["accuracy_se_before"]
    after = summary["accuracy_after"], summary["accuracy_se_after"]
    baseline = summary.get("sft_baseline_accuracy"), summary.get("sft_baseline_se")
    lines = [f"Accuracy on {summary['eval_n']} held-out prompts ({how}), with its standard error"]
    if ungraded := summary.get("eval_not_graded"):
        lines[0] += f"; {ungraded} completions could not be graded and count neither way"
    lines.append(f"  before RL         {_with_error(*before)}")
    if after[0] is not None:
        lines.append(f"  after RL          {_with_error(*after)}{_change(before, after, 'before')}")
    if baseline[0] is not None:
        lines.append(
            f"  SFT baseline      {_with_error(*baseline)}{_change(before, baseline, 'before')}"
        )
        lines.append(f"    (SFT baseline: {summary['sft_baseline']})")
        if after[0] is not None:
            lines.append(f"  RL vs SFT baseline {_change(baseline, after, 'SFT baseline').strip()}")
    lines += _set_lines(summary)
    if facts.dataset_remark:
        lines.append(f"  cold start        {facts.dataset_remark}")
    return lines


def _set_lines(summary: dict[str, Any]) -> list[str]:
    sets = summary.get("evaluation_sets", {})
    lines = [
        f"  {label:17s} {_with_error(found['accuracy'], found['se'])} on {found['n']} prompts"
        for label, found in sets.items()
    ]
    for name in ("pass", "maj"):
        for label, found in summary.get(f"{name}_at", {}).items():
            ks = [k for k in found if not k.endswith("_se")]
            texts = [f"{name}@{k} {_with_error(found[k], found[f'{k}_se'])}" for k in ks]
            lines.append(f"  {label:17s} {', '.join(texts)}")
    return lines


def _training_lines(summary: dict[str, Any], facts: RunFacts) -> list[str]:
    if not summary["steps"]:
        return _stepless_lines(summary)
    bound = "" if facts.strict_staleness else " for a typical rollout; a slow group may exceed it"
    return [
        f"RL steps            {summary['steps']}, {summary['rollouts_trained']} rollouts trained; "
        f"groups dropped: {_dropped_text(summary)}{_ungraded_text(summary)}",
        f"Mean reward         first 10 steps {_number(summary['reward_first10'])}, "
        f"last 10 steps {_number(summary['reward_last10'])}",
        "Sampled accuracy    of all rollouts, zero-variance groups too: first fifth of the steps "
        f"{_number(summary.get('sampled_accuracy_first'))}, last fifth "
        f"{_number(summary.get('sampled_accuracy_last'))}",
        f"Staleness           mean {_number(summary['staleness_mean'], 2)}, "
        f"max {_number(summary['staleness_max'], 0)} (bound {summary['max_staleness']}{bound}); "
        f"{summary['rollouts_spanning_versions']} rollouts span two or more versions",
        f"Logprob gap         {_number(summary['logprob_gap_mean'], 5)} mean |trainer - generator|",
        f"Weight sync         {_number(summary['weight_sync_s_median'], 2)} s median",
        f"Idle                trainer {_percent(summary['trainer_idle_fraction'])}, "
        f"generators {_percent(summary['generator_idle_fraction'])}",
        f"Ran on              {summary['engine']} {summary['engine_version']}, megatron-core "
        f"{summary['megatron_core_version']}, {_ranks(summary['trainer_world_size'])} "
        f"(TP {summary['tp']}, PP {summary['pp']}, DP {summary['dp']}), "
        f"{_number(summary['model_parameters'], 0)} parameters",
    ]


def _ranks(count: int) -> str:
    return "1 trainer rank" if count == 1 else f"{count} trainer ranks"


def _stepless_lines(summary: dict[str, Any]) -> list[str]:
    lines = ["No step of reinforcement learning was taken."]
    activity = ActivityTotals.of_counts(summary.get("activity", {}))
    if activity.count("rollouts_generated"):
        lines.append(f"Rollouts            {rollouts_text(activity)}")
    if activity.count("groups_complete") or summary.get("groups_dropped"):
        lines.append(f"Groups              {groups_text(activity)}")
    if summary.get("diagnosis"):
        lines.append(f"Likely fault        {summary['diagnosis']}")
    return lines


def _dropped_text(summary: dict[str, Any]) -> str:
    return reasons_text(Counter(summary["groups_dropped"])) or "none"


def _ungraded_text(summary: dict[str, Any]) -> str:
    # Summaries of earlier releases lack this key.
    ungraded = summary.get("completions_dropped")
    return f"; completions not graded: {reasons_text(Counter(ungraded))}" if ungraded else ""


def _change(start: tuple[Any, Any], end: tuple[Any, Any], name: str) -> str:
    difference, sigmas = difference_of(start, end)
    return "" if difference is None else f"   {difference_text(difference, sigmas, name)}"


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3f}" if error is None else f"{value:.3f} +- {error:.3f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%}"


def _step_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("source") == "trainer" and "train/loss" in row]


def _loop_interval(rows: list[Row]) -> Interval | None:
    """(first weight sync, end of the last step), in the rows' time."""
    steps = _step_rows(rows)
    synced = [row for row in rows if row.get("source") == "trainer" and "weight_sync/s" in row]
    if not steps or not synced:
        return None
    first = synced[0]
    if first is steps[0]:  # without a row for the sync of version 0, the first wait begins there
        begin = first["time"] - sum(
            first.get(k, 0.0) for k in ("train/update_s", "weight_sync/s", "wait/batch_s")
        )
        return begin, steps[-1]["time"]
    return first["time"], steps[-1]["time"]


def _evaluation_intervals(rows: list[Row]) -> list[Interval]:
    return [
        (row["time"] - row["eval/seconds"], row["time"]) for row in rows if "eval/seconds" in row
    ]


def _overlap(interval: Interval, others: Iterable[Interval]) -> float:
    """Seconds of the interval inside the others, which do not overlap."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], start)) for start, end in others)


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
