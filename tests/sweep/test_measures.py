"""Values of a run folder written by hand."""

import json
import math
from pathlib import Path

import pytest

from megatron_rl.config.files import dump_toml
from megatron_rl.protocol.metrics import RESUMED
from megatron_rl.sweep.measures import check_metric, measure, seconds_a_step
from megatron_rl.sweep.results import Estimate, collect
from tests.sweep.places import SWEEP, plan_of


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
    [found] = measure([tmp_path], names)
    assert found == {
        "accuracy_after": 0.5, "wall_s.rl": 7.5, "train/x": 9.5,  # mean of 5 to 14
        "train/none": None, "engine": None, "wall_s.sft": None,
    }  # fmt: skip


def test_losses_of_the_sft_baseline_are_not_those_of_training(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    grad_norms = {"sft": 5.0, "trainer": 1.0, "sft_baseline": 9.0}
    rows = [
        {"source": source, "step": k, "time": k, "train/grad_norm": value + k}
        for source, value in grad_norms.items()
        for k in range(1, 13)
    ]
    write_rows(tmp_path, rows)
    # The last ten steps of training: 1 + the mean of 3 to 12.
    assert measure([tmp_path], ["train/grad_norm"]) == [{"train/grad_norm": 8.5}]
    # A cold start alone: 5 + the mean of 3 to 12.
    write_rows(tmp_path, rows[:12])
    assert measure([tmp_path], ["train/grad_norm"]) == [{"train/grad_norm": 12.5}]


def test_accuracies_of_sets_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    sets = {"before.math": 0.25, "after.math": 0.75, "before.code": 0.5, "step_5.code": 1.0}
    found = {label: {"accuracy": value, "se": None, "n": 8} for label, value in sets.items()}
    summary = {"accuracy_before": 0.125, "accuracy_after": 0.0, "evaluation_sets": found}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    write_rows(tmp_path, [])
    names = [f"{at}{name}" for at in ("start", "end", "gain") for name in ("", ".math", ".code")]
    [measured] = measure([tmp_path], [*names, "end.other"])
    assert list(measured.values()) == [
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
    assert measure([tmp_path], ["a/b"]) == [{"a/b": 3.0}]


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
    [values] = measure([tmp_path], ["a/b", "c/d"])
    assert not any(math.isfinite(value) for value in values.values())


def leave_run(folder: Path, summary: dict, rows: list[dict]) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    write_rows(folder, rows)
    return folder


def test_a_run_that_dropped_nothing_dropped_0(tmp_path: Path) -> None:
    none = leave_run(tmp_path / "none", {"groups_dropped": {}, "completions_dropped": {}}, [])
    some = {"groups_dropped": {"zero_variance": 4}, "completions_dropped": {"no_place": 2}}
    runs = [none, leave_run(tmp_path / "some", some, []), leave_run(tmp_path / "old", {}, [])]
    names = [f"groups_dropped.{reason}" for reason in ("zero_variance", "not_needed", "zero_var")]
    names += ["completions_dropped.no_place", "wall_s.rl"]
    assert [list(values.values()) for values in measure(runs, names)] == [
        [0.0, 0.0, None, 0.0, None],
        [4.0, 0.0, None, 2.0, None],
        [None] * 5,  # the summary of an earlier release
    ]
    # Nothing tells whether the reason is misspelt.
    [values] = measure([none], ["completions_dropped.no_place"])
    assert values == {"completions_dropped.no_place": None}


def test_rows_without_a_count_are_rows_of_0(tmp_path: Path) -> None:
    """Of twelve steps, the first has 9, the last two have 1 and 4: 5 in the last ten."""
    counted = {1: 9.0, 11: 1.0, 12: 4.0}
    rows = []
    for k in range(1, 13):
        row = step_row(k, k, **{"rollout/reward": 0.5, "queue/groups_trained": 2})
        if k in counted:
            row |= {"reason/no_answer": counted[k], "queue/groups_learning_gold": counted[k]}
        # The task has no rollouts in the last step.
        if k < 12:
            row |= {"task/code/rollout/reward": 0.5, "task/code/reason/timeout": 1.0 * (k == 11)}
            row = {name: value for name, value in row.items() if value}
        rows += [row, {"source": "queue", "step": k, "time": k, "activity/seconds": 5.0}]
    rows[-1] |= {"activity/reason/no_answer": 20}
    some = leave_run(tmp_path / "some", {}, rows)
    none = leave_run(tmp_path / "none", {}, [step_row(1, 1.0, **{"rollout/reward": 0.5})])
    names = ["reason/no_answer", "queue/groups_learning_gold", "task/code/reason/timeout",
             "activity/reason/no_answer", "reason/no_answr", "queue/groups_dropped_not_graded",
             "launch/generator_restarts", "eval/accuracy"]  # fmt: skip
    first, second = (list(values.values()) for values in measure([some, none], names))
    assert first == [0.5, 0.5, 0.1, 2.0, None, 0.0, None, None]
    # One row of a step, without queue, task or activity.
    assert second == [0.0, *[None] * 7]


def test_a_seed_without_the_event_is_in_the_mean(tmp_path: Path) -> None:
    text = SWEEP.replace("accuracy_after", "groups_dropped.zero_variance")
    plan = plan_of(tmp_path, text)
    for run in plan.runs:
        dropped = {"zero_variance": 6} if (run.variant, run.seed) == ("high", 1) else {}
        leave_run(tmp_path / "made", {"steps": 3, "groups_dropped": dropped}, [])
        run.run_dir.parent.mkdir(exist_ok=True)
        (tmp_path / "made").rename(run.run_dir)
        (run.run_dir / "config.toml").write_text(dump_toml(run.config))
    low, high = collect(plan).figures
    assert low.estimate == Estimate(0.0, 0.0, 2)
    # 0 and 6: deviation 3 sqrt(2), error 3.
    assert high.estimate is not None and high.difference is not None
    assert (high.estimate.mean, high.estimate.n) == (3.0, 2)
    assert high.estimate.standard_error == pytest.approx(3.0)
    assert (high.difference.difference.n, high.difference.higher) == (2, 1)


def test_names_that_no_run_offers_are_refused_with_the_nearest() -> None:
    for name in ("accuracy_after", "wall_s.total", "groups_dropped.zero_variance", "train/any",
                 "step_s", "end", "start.math", "gain.code"):  # fmt: skip
        check_metric(name)
    with pytest.raises(ValueError, match="'acuracy_after' is not a key.*mean 'accuracy_after'"):
        check_metric("acuracy_after")
