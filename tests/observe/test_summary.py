"""Summary numbers from rows written by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.observe.facts import sampled_accuracy
from megatron_rl.observe.summary import (
    RunFacts,
    generator_idle_fraction,
    summarize,
    trainer_idle_fraction,
)
from megatron_rl.observe.summary_text import render_text
from megatron_rl.protocol.metrics import RESUMED

KEYS_OF_THE_ISSUE = {
    "engine", "engine_version", "megatron_core_version", "trainer_world_size", "tp", "pp", "dp",
    "model_parameters", "steps", "rollouts_trained", "groups_dropped_zero_variance", "eval_n",
    "accuracy_before", "accuracy_after", "accuracy_se_before", "accuracy_se_after",
    "reward_first10", "reward_last10", "rollouts_spanning_versions", "staleness_mean",
    "staleness_max", "logprob_gap_mean", "weight_sync_s_median", "generator_idle_fraction",
    "trainer_idle_fraction", "wall_s", "hf_export",
}  # fmt: skip
ADDED_KEYS = {
    "sft_baseline", "sft_baseline_accuracy", "sft_baseline_se", "max_staleness",
    "generator_restarts", "resumes",
    "groups_dropped", "completions_dropped", "eval_not_graded", "activity", "diagnosis",
    "rl_minus_sft_baseline", "rl_minus_sft_baseline_standard_errors", "sampled_accuracy_first",
    "sampled_accuracy_last", "pass_at", "maj_at", "evaluations", "evaluation_sets", "cold_start",
    "turns_mean", "given_tokens_mean", "wait_s_mean",
}  # fmt: skip

PASS_AT_4 = {"eval/pass_at_2": 0.6, "eval/pass_at_2_se": 0.02, "eval/pass_at_4": 0.75,
             "eval/pass_at_4_se": 0.03}  # fmt: skip
START = {
    "time": 99.0, "source": "trainer", "step": -1, "engine": "sglang", "engine_version": "0.5.23",
    "megatron_core_version": "0.16.1", "trainer/world_size": 2, "trainer/tp": 2, "trainer/pp": 1,
    "trainer/dp": 1, "model/parameters": 1000,
}  # fmt: skip
FIRST_WEIGHT_SYNC = {"time": 100.0, "source": "trainer", "step": 0, "weight_sync/s": 3.0}
FACTS = RunFacts(
    wall_s={"rl": 20.04, "total": 31.0},
    hf_export="runs/x/hf/final",
    max_staleness=2,
    eval_temperature=0.0,
    run_dir="runs/x",
)


def step_row(step: int, time: float, **values: float) -> dict[str, Any]:
    row = {
        "time": time, "source": "trainer", "step": step, "train/loss": 0.1, "train/update_s": 1.0,
        "weight_sync/s": 0.5, "wait/batch_s": 1.0, "rollout/reward": 0.5,
        "queue/rollouts_trained": 4,
        "queue/groups_dropped_zero_variance": 0, "queue/rollouts_spanning_versions": 0,
        "queue/staleness_versions_mean": 1.0, "queue/staleness_versions_max": 1,
    }  # fmt: skip
    return row | {name.replace("__", "/"): value for name, value in values.items()}


def eval_row(
    label: str, time: float, accuracy: float, *, seconds: float = 2.0, step: int = 0
) -> dict[str, Any]:
    return {
        "time": time, "source": "queue", "step": step, "label": label, "eval/accuracy": accuracy,
        "eval/accuracy_se": 0.03, "eval/n": 256, "eval/seconds": seconds, "eval/format": 1.0,
    }  # fmt: skip


def run_rows() -> list[dict[str, Any]]:
    """Version 0 at 100 s, its evaluation 100-102 s, steps that end at 105.5, 108 and 110 s."""
    sft = {"time": 50.0, "source": "sft", "step": 1, "train/loss": 2.0, "train/lr": 0.1}
    steps = [
        # waited 100-104 (2 of the 4 s during the evaluation), update 1 s, weight sync 0.5 s
        step_row(1, 105.5, **{"wait/batch_s": 4.0, "rollout/reward": 0.2, "weight_sync/s": 0.5}),
        # waited 105.5-106.5
        step_row(
            2,
            108.0,
            **{
                "wait/batch_s": 1.0,
                "rollout/reward": 0.4,
                "queue/rollouts_trained": 12,
                "queue/staleness_versions_mean": 2.0,
                "queue/staleness_versions_max": 3,
                "queue/rollouts_spanning_versions": 5,
                "queue/groups_dropped_zero_variance": 2,
                "train/logprob_gap": 0.001,
                "train/logprob_gap_tokens": 30,
            },
        ),  # fmt: skip
        # waited 0.5 s
        step_row(
            3,
            110.0,
            **{
                "wait/batch_s": 0.5,
                "rollout/reward": 0.9,
                "weight_sync/s": 1.0,
                "queue/rollouts_spanning_versions": 1,
                "queue/groups_dropped_zero_variance": 1,
                "train/logprob_gap": 0.005,
                "train/logprob_gap_tokens": 10,
            },
        ),  # fmt: skip
    ]
    evaluations = [
        eval_row("before", 102.0, 0.25), eval_row("after", 113.0, 0.5, step=3),
        eval_row("sft_baseline", 130.0, 0.31),
    ]  # fmt: skip
    return [sft, START, FIRST_WEIGHT_SYNC, *steps, *evaluations]


def test_keys_are_exactly_the_agreed_ones() -> None:
    assert set(summarize(run_rows(), FACTS)) == KEYS_OF_THE_ISSUE | ADDED_KEYS


def test_conversations_are_summed_up_by_the_rollouts_of_each_step() -> None:
    assert summarize(run_rows(), FACTS)["turns_mean"] is None
    assert "Conversations" not in render_text(summarize(run_rows(), FACTS), FACTS)
    rows = run_rows()
    means = iter([(1.0, 10.0, 0.0), (3.0, 30.0, 0.5), (2.0, 0.0, 1.0)])
    for row in rows:
        if "queue/rollouts_trained" in row:  # 4, 12 and 4
            names = ("environment/turns", "environment/given_tokens", "environment/wait_s")
            row |= dict(zip(names, next(means), strict=True))
    summary = summarize(rows, FACTS)
    found = [summary[name] for name in ("turns_mean", "given_tokens_mean", "wait_s_mean")]
    assert found == pytest.approx([(4 + 36 + 8) / 20, (40 + 360) / 20, (6 + 4) / 20])
    text = render_text(summary, FACTS)
    assert (
        "Conversations       on average 2.40 replies, 20.0 given tokens, 0.50 s of waiting" in text
    )


def test_values_are_those_worked_out_by_hand() -> None:
    summary = summarize(run_rows(), FACTS)
    assert summary["engine"] == "sglang"
    assert [summary[key] for key in ("trainer_world_size", "tp", "pp", "dp")] == [2, 2, 1, 1]
    assert summary["steps"] == 3  # neither the cold start's row nor the first weight sync
    assert summary["rollouts_trained"] == 4 + 12 + 4
    assert summary["groups_dropped_zero_variance"] == 3
    assert summary["rollouts_spanning_versions"] == 6
    assert summary["staleness_mean"] == pytest.approx((1 * 4 + 2 * 12 + 1 * 4) / 20)
    assert summary["staleness_max"] == 3
    assert summary["max_staleness"] == 2
    assert summary["logprob_gap_mean"] == pytest.approx((0.001 * 30 + 0.005 * 10) / 40)
    assert summary["weight_sync_s_median"] == pytest.approx(0.75)  # of 3.0, 0.5, 0.5, 1.0
    assert summary["reward_first10"] == summary["reward_last10"] == pytest.approx(0.5)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.5)
    assert (summary["sft_baseline_accuracy"], summary["sft_baseline_se"]) == (0.31, 0.03)
    assert summary["eval_n"] == 256
    assert summary["wall_s"] == {"rl": 20.0, "total": 31.0}


def test_the_verdict_beside_the_baseline_is_in_combined_standard_errors() -> None:
    summary = summarize(run_rows(), FACTS)
    assert summary["rl_minus_sft_baseline"] == pytest.approx(0.19)
    assert summary["rl_minus_sft_baseline_standard_errors"] == pytest.approx(0.19 / (0.03 * 2**0.5))
    without = [row for row in run_rows() if row.get("label") != "sft_baseline"]
    assert summarize(without, FACTS)["rl_minus_sft_baseline"] is None
    assert summarize(without, FACTS)["rl_minus_sft_baseline_standard_errors"] is None


def test_sampled_accuracy_is_of_all_rollouts_of_the_first_and_last_fifth_of_the_steps(
    tmp_path: Path,
) -> None:
    def write(name: str, *reasons: str | None) -> None:
        lines = [{"reward": reason and 0.1, "reason": reason or "lost"} for reason in reasons]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert sampled_accuracy(tmp_path) == (None, None)
    for step in range(1, 11):  # a fifth: 2 steps
        write(f"step_{step:06d}.jsonl", "correct", "wrong_answer")
    write("step_000010.jsonl", "correct", "correct")
    write("dropped_000002.jsonl", "wrong_answer", "wrong_answer", None)
    assert sampled_accuracy(tmp_path) == (2 / 6, 3 / 4)


def test_accuracy_is_read_of_texts_with_line_separators_and_of_torn_files(tmp_path: Path) -> None:
    lines = [{"reward": 1.0, "reason": "correct", "text": "a\u2028b\x85c"}] * 2
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "step_000000.jsonl").write_text(text + '{"reward": 0.1, "rea')
    assert sampled_accuracy(tmp_path) == (1.0, 1.0)


def test_what_must_be_known_of_the_examples_stands_with_the_accuracies() -> None:
    facts = dataclasses.replace(FACTS, dataset_remark="half of them are wrong")
    text = render_text(summarize(run_rows(), facts), facts)
    assert "  cold start        half of them are wrong" in text


def test_rewards_are_of_the_first_and_last_ten_steps() -> None:
    rows = [step_row(i, 100.0 + i, **{"rollout/reward": float(i)}) for i in range(1, 26)]
    summary = summarize(rows, RunFacts())
    assert summary["reward_first10"] == pytest.approx(5.5)
    assert summary["reward_last10"] == pytest.approx(20.5)


def test_trainer_idle_leaves_the_evaluation_out_of_waiting_and_of_the_loop() -> None:
    # Loop 100-110 s; the evaluation took 100-102. Waited 2 + 1 + 0.5 s of the other 8 s.
    assert trainer_idle_fraction(run_rows()) == pytest.approx(3.5 / 8.0)


def test_an_evaluation_during_which_training_goes_on_is_time_of_the_loop() -> None:
    """100 steps of 10 s that wait for 6; other engines evaluate for 98 s after each tenth step."""
    rows = [FIRST_WEIGHT_SYNC]
    for step in range(1, 101):
        rows.append(step_row(step, 100.0 + 10 * step, wait__batch_s=6.0, train__update_s=3.5))
        if step % 10 == 0:
            rows.append(eval_row(f"step_{step - 10}", 99.0 + 10 * step, 0.5, seconds=98.0))
    busy = {"source": "generator-0", "step": 1, "generator/idle_s": 2.0, "generator/busy_s": 6.0}
    rows += [busy | {"time": 150.0}]
    assert trainer_idle_fraction(rows) == pytest.approx(0.6)
    assert generator_idle_fraction(rows) == pytest.approx(0.25)
    # One evaluation follows the other.
    rows = [row | {"eval/seconds": 100.0} if "eval/seconds" in row else row for row in rows]
    assert trainer_idle_fraction(rows) == pytest.approx(0.6)


def test_the_time_in_which_a_run_was_stopped_is_no_time_of_the_loop() -> None:
    rows = [
        FIRST_WEIGHT_SYNC,
        step_row(1, 103.0),
        {"time": 3600.0, "source": "launch", "step": 1, RESUMED: 1},
        FIRST_WEIGHT_SYNC | {"time": 3700.0, "step": 1},
        step_row(2, 3704.0, **{"wait/batch_s": 2.0}),
    ]
    # Loop 100-103 and 3700-3704 s; waited 1 + 2 s.
    assert trainer_idle_fraction(rows) == pytest.approx(3.0 / 7.0)
    # The evaluation took 3601-3701 s: loop 100-103 and 3701-3704 s; waited 1 + 1.5 s.
    evaluation = {"time": 3701.0, "source": "queue", "step": 1, "eval/seconds": 100.0}
    assert trainer_idle_fraction([*rows[:4], evaluation, rows[4]]) == pytest.approx(2.5 / 6.0)
    # Without a row for the second weight sync, the loop begins with the wait: at 3700.5 s.
    assert trainer_idle_fraction([*rows[:3], rows[4]]) == pytest.approx(3.0 / 6.5)
    idle = {"source": "generator-0", "step": 1, "generator/idle_s": 8.0, "generator/busy_s": 0.0}
    busy = idle | {"time": 3702.0, "generator/idle_s": 1.0, "generator/busy_s": 3.0}
    assert generator_idle_fraction([*rows, idle | {"time": 3690.0}, busy]) == pytest.approx(1 / 4)
    summary = summarize(rows, FACTS)
    assert summary["resumes"] == 1
    assert "rl 20 s, total 31 s (since the latest of 2 starts)" in render_text(summary, FACTS)
    assert "since the latest" not in render_text(summarize(run_rows(), FACTS), FACTS)


def test_generator_idle_counts_rows_of_the_loop_outside_evaluations() -> None:
    def generator(time: float, idle: float, busy: float) -> dict[str, Any]:
        return {"time": time, "source": "generator-0", "step": 0, "generator/idle_s": idle,
                "generator/busy_s": busy}  # fmt: skip

    rows = run_rows() + [
        generator(90.0, 5.0, 0.0),  # before the loop
        generator(101.0, 0.0, 5.0),  # during the evaluation
        generator(105.0, 1.0, 2.0),
        generator(110.0, 0.0, 5.0),
        generator(125.0, 5.0, 0.0),  # after the loop
    ]
    assert generator_idle_fraction(rows) == pytest.approx(1.0 / 8.0)


def test_run_without_steps_has_no_invented_numbers() -> None:
    summary = summarize([eval_row("before", 10.0, 0.25)], RunFacts())
    assert summary["steps"] == 0
    assert summary["accuracy_before"] == 0.25
    for key in ("accuracy_after", "staleness_max", "logprob_gap_mean", "trainer_idle_fraction",
                "generator_idle_fraction", "weight_sync_s_median", "sft_baseline",
                "engine"):  # fmt: skip
        assert summary[key] is None
    assert "No step of reinforcement learning" in render_text(summary, RunFacts())


def test_text_shows_errors_and_baseline_and_calls_small_differences_undecided() -> None:
    text = render_text(summarize(run_rows(), FACTS), FACTS)
    assert "before RL         0.250 +- 0.030" in text
    # (0.5 - 0.25) / sqrt(0.03^2 + 0.03^2) = 5.9; (0.31 - 0.25) / 0.0424 = 1.4; 0.19 / 0.0424 = 4.5
    assert "after RL          0.500 +- 0.030   +0.250 to before, +5.9 combined" in text
    assert "+0.060 to before, +1.4 combined standard errors: too little to tell" in text
    assert "RL vs SFT baseline +0.190 to SFT baseline, +4.5 combined" in text
    assert "runs/x/hf/final" in text


def test_restarted_generators_are_counted_and_told_of() -> None:
    assert summarize(run_rows(), FACTS)["generator_restarts"] == 0
    restart = {"time": 107.0, "source": "launch", "step": 1, "launch/generator_restarts": 1}
    summary = summarize([*run_rows(), restart, restart], FACTS)
    assert summary["generator_restarts"] == 2
    assert "died and were restarted 2 times" in render_text(summary, FACTS)
    assert "restarted" not in render_text(summarize(run_rows(), FACTS), FACTS)


def activity_row(time: float, **counts: Any) -> dict[str, Any]:
    values = {f"activity/{name}": value for name, value in counts.items()}
    return {"time": time, "source": "queue", "step": 0} | values


def test_run_without_a_step_says_what_happened_and_what_is_likely_wrong() -> None:
    bad = {"format_failures/no_think_start": 30, "format_failures/no_boxed": 2}
    rows = [
        activity_row(1.0, rollouts_generated=40, rollouts_scored=32, tokens=400, **bad),
        activity_row(
            6.0, rollouts_scored=8, groups_complete=5, **bad, diagnosis="Cause: x. Fix: y.",
            **{"groups_dropped/zero_variance": 4, "groups_dropped/attempts_exhausted": 1},
            **{"completions_dropped/ungradable": 3, "completions_dropped/not_graded": 1},
        ),
    ]  # fmt: skip
    summary = summarize(rows, RunFacts())
    assert summary["groups_dropped"] == {"zero_variance": 4, "attempts_exhausted": 1}
    assert summary["activity"]["format_failures/no_think_start"] == 60
    text = render_text(summary, RunFacts())
    assert (
        "40 generated, 40 scored: 0 correct, 64 format failures (no_think_start 60, no_box" in text
    )
    assert "5 groups complete, dropped: zero_variance 4, attempts_exhausted 1" in text
    assert summary["completions_dropped"] == {"ungradable": 3, "not_graded": 1}
    assert "4 dropped without a grade (ungradable 3, not_graded 1)" in text
    assert "Cause: x. Fix: y." in text


def test_groups_dropped_are_those_that_the_batches_count() -> None:
    rows = [
        *run_rows(), activity_row(111.0, **{"groups_dropped/zero_variance": 50}),
        step_row(4, 112.0, **{"queue/groups_dropped_prompt_unrenderable": 2}),
    ]  # fmt: skip
    summary = summarize(rows, FACTS)
    assert summary["groups_dropped"] == {"zero_variance": 3, "prompt_unrenderable": 2}
    assert "groups dropped: zero_variance 3, prompt_unrenderable 2" in render_text(summary, FACTS)
    assert "groups dropped: none" in render_text(summarize([step_row(1, 2.0)], FACTS), FACTS)


def test_completions_without_a_grade_are_those_that_the_batches_and_the_evaluation_count() -> None:
    rows = [
        *run_rows(), activity_row(111.0, **{"completions_dropped/ungradable": 50}),
        step_row(4, 112.0, **{"queue/completions_dropped_ungradable": 2}),
        step_row(5, 113.0, **{"queue/completions_dropped_ungradable": 3}),
        eval_row("after", 114.0, 0.5, step=5) | {"eval/not_graded": 7} | PASS_AT_4,
    ]  # fmt: skip
    summary = summarize(rows, FACTS)
    assert summary["completions_dropped"] == {"ungradable": 5}
    text = render_text(summary, FACTS)
    assert "groups dropped: zero_variance 3; completions not graded: ungradable 5" in text
    assert summary["pass_at"] == {"after": {"2": 0.6, "2_se": 0.02, "4": 0.75, "4_se": 0.03}}
    assert "  after             pass@2 0.600 +- 0.020, pass@4 0.750 +- 0.030" in text
    assert "standard error; 7 completions could not be graded and count neither way" in text


def test_evaluation_sets_and_votes_are_named_beside_the_held_out_prompts() -> None:
    votes = {"eval/maj_at_4": 0.9, "eval/maj_at_4_se": 0.05}
    rows = [eval_row("before", 100.0, 0.4), eval_row("before.aime", 101.0, 0.2) | votes]
    summary = summarize(rows, RunFacts())
    assert summary["accuracy_before"] == 0.4
    assert summary["maj_at"] == {"before.aime": {"4": 0.9, "4_se": 0.05}}
    [(label, found)] = summary["evaluation_sets"].items()
    assert (label, found["accuracy"]) == ("before.aime", 0.2)
    text = render_text(summary, RunFacts())
    assert "before.aime       0.200" in text and "maj@4 0.900 +- 0.050" in text
    alone = summarize(rows[1:], RunFacts())
    assert alone["accuracy_before"] is None and "before.aime" in render_text(alone, RunFacts())


def test_evaluations_of_a_resumed_run_are_in_the_order_of_their_latest() -> None:
    # It had ended after step 4.
    labels = ["before", "step_2", "after", "step_4", "step_6", "after"]
    rows = [
        eval_row(f"{label}{of}", 100.0 + place, place / 10)
        for place, label in enumerate(labels)
        for of in ("", ".val")
    ]
    summary = summarize(rows, RunFacts())
    ordered = ["before", "step_2", "step_4", "step_6", "after"]
    assert list(summary["evaluations"]) == ordered
    assert list(summary["evaluation_sets"]) == [f"{label}.val" for label in ordered]
    assert summary["evaluation_sets"]["after.val"]["accuracy"] == 0.5


def test_one_prompt_has_no_standard_error() -> None:
    rows = [eval_row("before", 100.0, 0.0), eval_row("after", 101.0, 1.0),
            eval_row("after.aime", 102.0, 0.25) | {"eval/pass_at_4": 1.0}]  # fmt: skip
    for row in rows:
        row["eval/n"] = 1
        del row["eval/accuracy_se"]
    summary = summarize(rows, RunFacts())
    assert summary["evaluation_sets"] == {"after.aime": {"accuracy": 0.25, "se": None, "n": 1}}
    lines = render_text(summary, RunFacts()).splitlines()
    assert lines[0].startswith("Accuracy on 1 held-out prompt (")
    assert lines[1:5] == [
        "  before RL         0.000",
        "  after RL          1.000   +1.000 to before",
        "  after.aime        0.250 on 1 prompt",
        "  after.aime        pass@4 1.000",
    ]
