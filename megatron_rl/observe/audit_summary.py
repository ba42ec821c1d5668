"""Checks the values of summary.json against metrics and records. Used by the audit.

Sums, means, medians and copies are worked out here, without the code that wrote the file. Idle
shares, activity and the choice of the cold start are computed by that code (`summary.py`) again:
this shows only that the file belongs to the metrics.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from math import hypot
from pathlib import Path
from statistics import fmean, median

from megatron_rl.config.tree import Config
from megatron_rl.observe.audit_findings import Findings, agree
from megatron_rl.observe.facts import SAMPLED_STEPS, read_summary
from megatron_rl.observe.missing_records import TRAINED
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DROPPED,
    CONTINUED,
    GENERATOR_RESTARTS,
    GROUPS_DROPPED,
    MAJ_AT,
    PASS_AT,
    RESUMED,
    Row,
    stream_rows,
)

RULE = "the summary matches the metrics and records"
AGAIN = "idle shares, activity, cold start of the summary, computed again, are the same"
_AGAIN = (
    "activity", "diagnosis", "cold_start", "generator_idle_fraction", "trainer_idle_fraction",
)  # fmt: skip
_FACTS = {
    "engine": "engine", "engine_version": "engine_version",
    "megatron_core_version": "megatron_core_version", "trainer_world_size": "trainer/world_size",
    "tp": "trainer/tp", "pp": "trainer/pp", "dp": "trainer/dp",
    "model_parameters": "model/parameters",
}  # fmt: skip
_SAMPLED = ("sampled_accuracy_first", "sampled_accuracy_last")
Sampled = Mapping[int, Counter[str]]
"""By step: "graded" and "correct" recorded rollouts, dropped ones included."""


def check_summary(
    run_dir: Path,
    rows: list[Row],
    stages: list[Config],
    sampled: Sampled | None,
    findings: Findings,
) -> None:
    """rows: without activity; all values are numbers. stages: of all parts of the run.

    sampled: None if records are missing.
    """
    summary = read_summary(run_dir)
    steps = [row for row in rows if TRAINED in row]
    wanted = _copied(rows) | _of_evaluations(rows) | _of_steps(steps)
    wanted["max_staleness"] = max(one.queue.max_staleness for one in stages)
    synced = [
        r["weight_sync/s"] for r in rows if r.get("source") == "trainer" and "weight_sync/s" in r
    ]
    wanted["weight_sync_s_median"] = median(synced) if synced else None
    if sampled is None:
        findings.skipped.append(f"summary.json: {', '.join(_SAMPLED)}: records are missing")
    else:
        wanted |= _of_records(sampled)
    if "evaluations" not in summary:
        # An earlier release wrote it.
        del wanted["evaluations"]
    _compare(RULE, _as_listed(wanted, summary), summary, findings)
    again = summarize(stream_rows(run_dir / "metrics.jsonl"), RunFacts())
    _compare(AGAIN, {name: again[name] for name in _AGAIN}, summary, findings)
    others = sorted(summary.keys() - wanted.keys() - set(_AGAIN) - set(_SAMPLED))
    if others:
        findings.skipped.append(f"summary.json: {', '.join(others)}: no record has them")


def _as_listed(wanted: Row, summary: Row) -> Row:
    """The wanted values, without rewards of evaluations in a summary of an earlier release."""
    kinds = [kind for kind in ("evaluations", "evaluation_sets") if kind in wanted]
    # Its values may be anything.
    if '"reward"' in json.dumps([summary.get(kind) for kind in kinds]):
        return wanted
    plain = {
        kind: {
            label: {name: value for name, value in found.items() if name != "reward"}
            for label, found in wanted[kind].items()
        }
        for kind in kinds
    }
    return wanted | plain


def _compare(rule: str, wanted: Row, summary: Row, findings: Findings) -> None:
    for name, value in wanted.items():
        findings.check(
            rule, agree(summary.get(name), value),
            f"{name} is {summary.get(name)} in summary.json and {value} by the records",
        )  # fmt: skip


def _copied(rows: list[Row]) -> Row:
    """Facts about the trainer, and counts of restarts."""
    trainer = (row for row in rows if row.get("source") == "trainer" and "model/parameters" in row)
    start = next(trainer, {})
    return {name: start.get(metric) for name, metric in _FACTS.items()} | {
        "generator_restarts": sum(row.get(GENERATOR_RESTARTS, 0) for row in rows),
        # A run may begin at the checkpoint of another one.
        "resumes": sum(
            RESUMED in row and (at > 0 or CONTINUED in row) for at, row in enumerate(rows)
        ),
    }


def _of_evaluations(rows: list[Row]) -> Row:
    rows = _without_earlier_ends(rows)
    last = {row["label"]: row for row in rows}
    before, after, baseline = (last.get(n, {}) for n in ("before", "after", "sft_baseline"))
    measured = {
        label: {"accuracy": row["eval/accuracy"], "se": row.get("eval/accuracy_se")}
        | {"n": row["eval/n"]}
        | ({"reward": row["eval/reward"]} if "eval/reward" in row else {})
        for label, row in last.items()
    }
    held_out = [row for row in rows if "." not in row["label"]]
    latest = after or before or next(reversed(held_out), {})
    gain = sigmas = None
    if after and baseline:
        gain = after["eval/accuracy"] - baseline["eval/accuracy"]
        errors = [row.get("eval/accuracy_se") for row in (after, baseline)]
        if None not in errors and any(errors):
            sigmas = gain / hypot(*errors)
    return {
        "eval_n": latest.get("eval/n"),
        "eval_not_graded": latest.get("eval/not_graded"),
        "accuracy_before": before.get("eval/accuracy"),
        "accuracy_after": after.get("eval/accuracy"),
        "accuracy_se_before": before.get("eval/accuracy_se"),
        "accuracy_se_after": after.get("eval/accuracy_se"),
        "sft_baseline_accuracy": baseline.get("eval/accuracy"),
        "sft_baseline_se": baseline.get("eval/accuracy_se"),
        "rl_minus_sft_baseline": gain,
        "rl_minus_sft_baseline_standard_errors": sigmas,
        "pass_at": _by_label(last, PASS_AT),
        "maj_at": _by_label(last, MAJ_AT),
        "evaluations": {label: found for label, found in measured.items() if "." not in label},
        "evaluation_sets": {label: found for label, found in measured.items() if "." in label},
    }  # fmt: skip


def _without_earlier_ends(rows: list[Row]) -> list[Row]:
    """Evaluations; "after" only of the last step, the SFT baseline only if no step follows it."""
    found: list[Row] = []
    has_later_step = False
    end = max((row["step"] for row in rows if TRAINED in row), default=None)
    for row in reversed(rows):
        has_later_step |= TRAINED in row
        kind = row.get("label", "").split(".")[0]
        is_old = {"after": end not in (None, row["step"]), "sft_baseline": has_later_step}
        if "eval/accuracy" in row and not is_old.get(kind, False):
            found.append(row)
    return found[::-1]


def _by_label(last: dict[str, Row], prefix: str) -> dict[str, Row]:
    by_label = {label: _ending(row, prefix) for label, row in last.items()}
    return {label: found for label, found in by_label.items() if found}


def _ending(row: Row, prefix: str) -> Row:
    return {name[len(prefix) :]: value for name, value in row.items() if name.startswith(prefix)}


def _of_steps(steps: list[Row]) -> Row:
    """Sums and means over the steps."""
    rewards = _values(steps, "rollout/reward")
    found: Row = {
        "steps": len(steps),
        "rollouts_trained": sum(row[TRAINED] for row in steps),
        "groups_dropped_zero_variance": sum(_values(steps, f"{GROUPS_DROPPED}zero_variance")),
        "reward_first10": fmean(rewards[:10]) if rewards else None,
        "reward_last10": fmean(rewards[-10:]) if rewards else None,
        "rollouts_spanning_versions": sum(_values(steps, "queue/rollouts_spanning_versions")),
        "staleness_mean": _mean(steps, "queue/staleness_versions_mean", TRAINED),
        "staleness_max": max(_values(steps, "queue/staleness_versions_max"), default=None),
        "logprob_gap_mean": _mean(steps, "train/logprob_gap", "train/logprob_gap_tokens"),
    }  # fmt: skip
    for name in ("turns", "given_tokens", "wait_s"):
        found[f"{name}_mean"] = _mean(steps, f"environment/{name}", TRAINED)
    if steps:
        # A run without a step has the counts of its activity instead.
        found["groups_dropped"] = _sums(steps, GROUPS_DROPPED)
        found["completions_dropped"] = _sums(steps, COMPLETIONS_DROPPED)
    return found


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mean(steps: Iterable[Row], name: str, weight: str) -> float | None:
    weighed = [(row[name], row.get(weight, 1)) for row in steps if name in row]
    in_all = sum(by for _, by in weighed)
    return sum(value * by for value, by in weighed) / in_all if in_all else None


def _sums(steps: Iterable[Row], prefix: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in steps:
        found.update(_ending(row, prefix))
    return {name: count for name, count in found.items() if count}


def _of_records(sampled: Sampled) -> Row:
    """Shares of correct rollouts in the first and the last fifth of steps, of 10 at most."""
    steps = sorted(sampled)
    count = min(SAMPLED_STEPS, max(1, len(steps) // 5))
    return {
        name: _share([sampled[step] for step in some])
        for name, some in zip(_SAMPLED, (steps[:count], steps[-count:]), strict=True)
    }


def _share(counts: list[Counter[str]]) -> float | None:
    graded = sum(one["graded"] for one in counts)
    return sum(one["correct"] for one in counts) / graded if graded else None
