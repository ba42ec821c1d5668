"""Values of a run folder written by hand."""

import json
import math
from pathlib import Path

import pytest

from megatron_rl.protocol.metrics import RESUMED
from megatron_rl.sweep.measures import check_metric, measure, seconds_a_step


def step_row(step: int, time: float, **values: float) -> dict:
    row = {"source": "trainer", "step": step, "time": time, "train/loss": 0.0, "weight_sync/s": 0.0}
    return row | values


def write_rows(folder: Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_metrics_come_from_the_summary_or_from_the_last_ten_rows(tmp_path: Path) -> None:
    summary = {"accuracy_after": 0.5, "wall_s": {"rl": 7.5}, "engine": "sglang", "steps": 3}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_rows(tmp_path, [step_row(k, k, **{"train/x": float(k)}) for k in range(1, 15)])
    names = ["accuracy_after", "wall_s.rl", "train/x", "train/none", "engine", "wall_s.sft"]
    assert measure(tmp_path, names) == {
        "accuracy_after": 0.5, "wall_s.rl": 7.5, "train/x": 9.5,  # mean of 5 to 14
        "train/none": None, "engine": None, "wall_s.sft": None,
    }  # fmt: skip


def test_accuracies_of_sets_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    sets = {"before.math": 0.25, "after.math": 0.75, "before.code": 0.5, "step_5.code": 1.0}
    found = {label: {"accuracy": value, "se": None, "n": 8} for label, value in sets.items()}
    summary = {"accuracy_before": 0.125, "accuracy_after": 0.0, "evaluation_sets": found}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_rows(tmp_path, [])
    names = [f"{at}{name}" for at in ("start", "end", "gain") for name in ("", ".math", ".code")]
    assert list(measure(tmp_path, [*names, "end.other"]).values()) == [
        0.125, 0.25, 0.5,
        # Nothing after training on code: it was not trained, and its first accuracy is its last.
        0.0, 0.75, 0.5,
        -0.125, 0.5, None, None,
    ]  # fmt: skip


def test_steps_that_were_taken_again_count_once(tmp_path: Path) -> None:
    rows = [step_row(1, 1.0, **{"a/b": 1.0}), step_row(2, 3.0, **{"a/b": 100.0})]
    rows += [{"source": "launch", "step": 1, "time": 50.0, RESUMED: 1}]
    rows += [step_row(2, 60.0, **{"a/b": 3.0}), step_row(3, 62.0, **{"a/b": 5.0})]
    write_rows(tmp_path, rows)
    (tmp_path / "summary.json").write_text("{}")
    assert measure(tmp_path, ["a/b"]) == {"a/b": 3.0}


def test_seconds_a_step_are_a_median_without_interruptions() -> None:
    # An evaluation took place before the third end.
    ends = [1.0, 3.0, 500.0, 502.5]
    assert seconds_a_step([step_row(k, end) for k, end in enumerate(ends)]) == 2.5
    resumed = {"source": "launch", "step": 2, "time": 450.0, RESUMED: 1}
    rows = [step_row(1, 1.0), step_row(2, 3.0), resumed, step_row(3, 500.0), step_row(4, 502.5)]
    assert seconds_a_step(rows) == 2.25
    assert seconds_a_step([step_row(1, 1.0), resumed, step_row(2, 500.0)]) is None


def test_a_metric_that_diverged_is_not_finite(tmp_path: Path) -> None:
    rows = [step_row(1, 1.0, **{"a/b": math.inf, "c/d": 1e308})]
    write_rows(tmp_path, [*rows, step_row(2, 2.0, **{"a/b": -math.inf, "c/d": 1e308})])
    (tmp_path / "summary.json").write_text("{}")
    values = measure(tmp_path, ["a/b", "c/d"])
    assert not any(math.isfinite(value) for value in values.values())


def test_names_that_no_run_offers_are_refused_with_the_nearest() -> None:
    for name in ("accuracy_after", "wall_s.total", "groups_dropped.zero_variance", "train/any",
                 "step_s", "end", "start.math", "gain.code"):  # fmt: skip
        check_metric(name)
    with pytest.raises(ValueError, match="'acuracy_after' is not a key.*mean 'accuracy_after'"):
        check_metric("acuracy_after")
