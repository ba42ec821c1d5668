"""Reads the metrics of complete runs from their summaries and metrics.jsonl.

Used by `megatron-rl sweep`.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.lookup import nearest
from megatron_rl.config.renamed import RENAMED_METRICS
from megatron_rl.observe.facts import read_summary
from megatron_rl.observe.metrics_table import is_known, zero_beside
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.protocol.metrics import COMPLETIONS_DROPPED, GROUPS_DROPPED, RESUMED, stream_rows

STEP_S = "step_s"
"""Metric: median seconds between the ends of consecutive steps."""
LAST_ROWS = 10
"""Rows averaged of a metric with a slash, as in reward_last10."""
_SUPERVISED = ("sft", "sft_baseline")
"""Sources of the supervised phases, which share names of `train/` with the trainer."""

_AT = ("start", "end", "gain")
"""Accuracy before training, after it, and the difference: `end` of held-out prompts, `end.SET` of a
set."""

_COUNTS = {
    "groups_dropped": GROUPS_DROPPED,
    "completions_dropped": COMPLETIONS_DROPPED,
    "activity": "activity/",
}
"""Tables of counts in summary.json -> prefix of the metrics that they add up."""

Row = dict[str, Any]


def check_metric(name: str) -> None:
    """Raise ValueError for an unknown metric, with the nearest known name."""
    if name in RENAMED_METRICS:
        raise ValueError(f"metrics: {name!r} is named {RENAMED_METRICS[name]!r} now")
    known = [*summarize([], RunFacts()), STEP_S, *_AT]
    if "/" in name or name.partition(".")[0] in known:
        return
    raise ValueError(
        f"metrics: {name!r} is not a key of summary.json{nearest(name, known)}. Metrics of "
        "metrics.jsonl have a slash"
    )


def measure(run_dirs: Sequence[Path], names: Sequence[str]) -> list[dict[str, float | None]]:
    """Metrics of each run; None: not measured.

    A count that a run lacks because nothing was counted is 0. The end of a name, such as a reason,
    may be misspelt: unless the queue knows the reason, one of these runs must have the name.
    """
    runs = [_measure(run_dir, names) for run_dir in run_dirs]
    seen = {name for values, _ in runs for name, value in values.items() if value is not None}
    return [
        {
            name: 0.0
            if name in zeros and (name in seen or is_known(_counted_name(name)))
            else value
            for name, value in values.items()
        }
        for values, zeros in runs
    ]


def _measure(run_dir: Path, names: Sequence[str]) -> tuple[dict[str, float | None], set[str]]:
    """Metrics, None for an absent one; and the absent ones that are 0 if their names are right."""
    besides = set(map(zero_beside, names)) - {""}
    kept = {"source", "time", "train/loss", RESUMED, *names, *besides}
    rows = [
        {name: row[name] for name in row.keys() & kept}
        for row in stream_rows(run_dir / "metrics.jsonl")
        if not row.keys().isdisjoint(kept - {"source", "time"})
    ]
    summary = read_summary(run_dir)
    values = {name: _value(name, summary, rows) for name in names}
    zeros = {name for name in names if values[name] is None and _is_zero(name, summary, rows)}
    return values, zeros


def _value(name: str, summary: dict[str, Any], rows: list[Row]) -> float | None:
    if "/" in name:
        if not any(name in row for row in rows):
            return None
        if any(name in row and row.get("source") == "trainer" for row in rows):
            # The SFT baseline comes last: its rows would stand for those of the policy.
            rows = [row for row in rows if row.get("source") not in _SUPERVISED]
        beside = zero_beside(name)
        values = [row.get(name, 0.0) for row in rows if name in row or beside in row]
        return mean_of(values[-LAST_ROWS:])
    if name == STEP_S:
        return seconds_a_step(rows)
    at, _, name_of_set = name.partition(".")
    if at in _AT:
        return _accuracy_at(at, name_of_set, summary)
    found: Any = summary
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


def _is_zero(name: str, summary: dict[str, Any], rows: list[Row]) -> bool:
    """Whether an absent metric is a count of nothing."""
    beside = zero_beside(_counted_name(name))
    if "/" in name:
        return any(beside in row for row in rows)
    return bool(beside) and isinstance(summary.get(name.partition(".")[0]), dict)


def _counted_name(name: str) -> str:
    """The metric that a key of _COUNTS adds up; another name as it is."""
    table, _, key = name.partition(".")
    return _COUNTS[table] + key if table in _COUNTS else name


def _accuracy_at(at: str, name_of_set: str, summary: dict[str, Any]) -> float | None:
    """One of _AT; name_of_set: empty for the held-out prompts.

    A run without reinforcement learning is evaluated once, after its cold start: that is its `end`,
    and another run measures its `start`.
    """
    before, after = (_accuracy(label, name_of_set, summary) for label in ("before", "after"))
    if at == "gain":
        return None if before is None or after is None else after - before
    return after if at == "end" and after is not None else before


def _accuracy(label: str, name_of_set: str, summary: dict[str, Any]) -> float | None:
    if not name_of_set:
        return summary.get(f"accuracy_{label}")
    found = summary.get("evaluation_sets", {}).get(f"{label}.{name_of_set}", {})
    return found.get("accuracy")


def seconds_a_step(rows: Sequence[Row]) -> float | None:
    """Median over the steps, without the first step after each start or resume."""
    gaps, last_end = [], None
    for row in rows:
        if RESUMED in row:
            last_end = None
        elif row.get("source") == "trainer" and "train/loss" in row:
            if last_end is not None:
                gaps.append(row["time"] - last_end)
            last_end = row["time"]
    return statistics.median(gaps) if gaps else None


def mean_of(values: Sequence[float]) -> float:
    """Mean; not finite when a value is not: diverged runs count."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(values))
