"""What the view reads and prints."""

import dataclasses
import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli.status import of_rows
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.live_view import Awaited, LiveView
from megatron_rl.launcher.restarts import restart_rule
from megatron_rl.launcher.role import Role
from megatron_rl.observe.run_state import evaluation_line, restart_line
from tests.cli.test_status import HELD, IDLE

STEP = {
    "time": 1.0, "source": "trainer", "step": 7, "train/loss": 0.1, "rollout/reward": 0.625,
    "wait/batch_s": 0.25,
}  # fmt: skip
EVALUATION = {
    "time": 2.0, "source": "queue", "step": 7, "label": "after", "eval/accuracy": 0.75,
    "eval/accuracy_se": 0.025, "eval/n": 300,
}  # fmt: skip
RESTART = {
    "time": 3.0, "source": "launch", "step": 7, "launch/generator_restarts": 1,
    "role": "generator-0", "exit_code": -9, "restart": 2, "max_restarts": 3,
}  # fmt: skip
RESTART_LINE = "warning: generator-0 ended with signal 9 after step 7; restart 2 of 3"


ROLLOUTS = {
    "time": 4.0, "source": "queue", "step": 0, "activity/seconds": 2.0, "activity/tokens": 300,
    "activity/rollouts_generated": 12, "activity/rollouts_scored": 10,
    "activity/format_failures/no_think_start": 7, "activity/reason/correct": 2,
    "activity/reason/wrong_answer": 1, "activity/groups_complete": 2,
    "activity/groups_dropped/zero_variance": 2, "activity/completions_in_flight": 6,
}  # fmt: skip
ROLLOUTS_LINE = (
    "rollouts: 12 generated, 10 scored: 2 correct, 1 not (wrong_answer 1), 7 format failures "
    "(no_think_start 7); 2 groups complete, dropped: zero_variance 2; 150 generated tok/s; 6 in "
    "flight"
)


class Clock:
    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_plain_output_has_one_line_a_step_and_an_evaluation(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    with LiveView(config, Console(file=output, width=80)) as view:
        view.enter_phase("reinforcement learning")
        append(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n")
        view.refresh({})
        append(tmp_path / "metrics.jsonl", json.dumps(STEP | {"step": 8}) + "\n")
        append(tmp_path / "metrics.jsonl", json.dumps(EVALUATION) + "\n")
    lines = output.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].endswith("reinforcement learning")
    assert lines[1].startswith("step 7/40: reward 0.625")
    assert lines[2].startswith("gap -: no token of the step was sampled under the current policy")
    # It is said once.
    assert lines[3].startswith("step 8/40: reward 0.625")
    assert lines[4].startswith("evaluation after: accuracy 0.750 +- 0.025 on 300 held-out prompts")


def test_what_comes_to_be_wrong_is_said_once_with_its_fix(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    clock = Clock()
    with LiveView(config, Console(file=output, width=80), clock=clock) as view:
        for number, gap in enumerate([0.001, 0.3, 0.3, 0.3, 0.001, 0.001, 0.001, 0.001]):
            row = STEP | {"step": number, "time": 10.0 * number, "train/logprob_gap": gap}
            append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
            clock.now += 60
            view.refresh({})
    said = [line for line in output.getvalue().splitlines() if line.startswith("warning")]
    # The median of the two steps, 0.15, is above the limit, and so it stays until the seventh.
    assert len(said) == 1
    assert "train/logprob_gap is 0.1505 in the latest 2 steps, above 0.05: " in said[0]


def test_the_table_tells_how_long_the_rest_takes(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    console = Console(file=output, width=120, force_terminal=True)
    with LiveView(config, console, clock=Clock()) as view:
        # Median of 20, 20 and 80 s between steps; 30 are left.
        for number, at in ((7, 0.0), (8, 20.0), (9, 40.0), (10, 120.0)):
            row = STEP | {"step": number, "time": at}
            append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
        view.refresh({})
    assert ", about 10 min 00 s left" in output.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_evaluation_shows_how_far_it_is(tmp_path: Path, is_terminal: bool) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    further = {"eval/running": "before", "eval/completions_wanted": 1000}
    console = Console(file=output, width=200, force_terminal=is_terminal)
    with LiveView(config, console, clock=clock) as view:
        for at, done in ((100.0, 200), (120.0, 300)):
            row = ROLLOUTS | further | {"time": at, "eval/completions_done": done}
            append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
            clock.now += 20
            view.refresh({})
    # 5 a second, 700 left.
    assert "evaluation before: 300 of 1,000 completions scored, about 2 min 20 s left" in (
        output.getvalue()
    )
    assert ("━" in output.getvalue()) == is_terminal


def test_evaluation_tells_what_could_not_be_graded() -> None:
    line = evaluation_line(EVALUATION | {"eval/not_graded": 3})
    assert line.endswith("3 completions could not be graded")
    nothing = {"label": "before", "eval/n": 0, "eval/lost": 2, "eval/not_graded": 2}
    assert evaluation_line(nothing) == (
        "evaluation before: not measured, 2 completions could not be graded"
    )
    assert "graded" not in evaluation_line(EVALUATION)
    assert evaluation_line(EVALUATION | {"eval/reward": 0.5}).endswith(", mean reward 0.500")
    alone = EVALUATION | {"eval/n": 1, "label": "after.aime"}
    del alone["eval/accuracy_se"]
    assert "after.aime: accuracy 0.750 on 1 prompt, format" in evaluation_line(alone)


def test_terminal_output_draws_steps(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    append(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n")
    with LiveView(config, Console(file=output, width=120, force_terminal=True)) as view:
        view.refresh({})
    assert "0.625" in output.getvalue()
    assert "last steps of 40" in output.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_restart_of_a_generator_is_a_warning(tmp_path: Path, is_terminal: bool) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    append(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n" + json.dumps(RESTART) + "\n")
    with LiveView(config, Console(file=output, width=120, force_terminal=is_terminal)) as view:
        assert view.last_step == -1
        view.refresh({})
        assert view.last_step == 7
    assert RESTART_LINE in output.getvalue()


PEERS = {
    "time": 5.0, "source": "queue", "step": 7, "peers/generators": 2, "peers/generators_wanted": 2,
    "peers/verifiers": 1, "peers/verifiers_wanted": 1, "peers/missing": "",
}  # fmt: skip


@pytest.mark.parametrize("is_terminal", [False, True])
def test_engines_and_verifiers_that_the_queue_misses_are_named_and_counted(
    tmp_path: Path, is_terminal: bool
) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    console = Console(file=output, width=160, force_terminal=is_terminal)
    gone = {"peers/verifiers": 0, "peers/missing": "verifier"}
    with LiveView(config, console, clock=clock) as view:
        append(tmp_path / "metrics.jsonl", json.dumps(PEERS) + "\n")
        look_every_second(view, clock, 2)
        assert "warning" not in output.getvalue()
        append(tmp_path / "metrics.jsonl", json.dumps(PEERS | gone) + "\n")
        look_every_second(view, clock, 1)
        assert list(view.state.peers.missing) == ["verifier"]
        append(tmp_path / "metrics.jsonl", json.dumps(PEERS) + "\n")
        look_every_second(view, clock, 1)
        assert not view.state.peers.missing
    shown = output.getvalue()
    assert (
        "warning: the queue no longer hears verifier and gives its work to others; engines 2 of 2, "
        "verifiers 0 of 1: see logs/verifier*"
    ) in shown
    assert ("engines 2 of 2, verifiers 0 of 1 (missing: verifier)" in shown) == is_terminal


def test_restart_before_the_first_step_says_so() -> None:
    assert restart_line(RESTART | {"step": -1}).endswith("before the first step; restart 2 of 3")


def look_every_second(
    view: LiveView, clock: Clock, seconds: int, roles: dict | None = None
) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        view.refresh(roles or {})


def test_plain_log_shows_rollouts_at_once_and_then_at_most_one_line_in_10_s(
    tmp_path: Path,
) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    with LiveView(config, Console(file=output, width=80), clock=clock) as view:
        view.enter_phase("reinforcement learning")
        append(tmp_path / "metrics.jsonl", json.dumps(ROLLOUTS) + "\n")
        look_every_second(view, clock, 1)
        assert output.getvalue().splitlines()[1:] == [f"[   1.0 s] {ROLLOUTS_LINE}"]
        for _ in range(12):
            append(tmp_path / "metrics.jsonl", json.dumps(ROLLOUTS) + "\n")
            look_every_second(view, clock, 5)
    lines = output.getvalue().splitlines()
    assert len(lines) == 2 + 6
    # A look each second, rows each five: the last line is of the 13 rows up to 61 s.
    assert lines[-1].startswith("[  61.0 s] rollouts: 156 generated, 130 scored: 26 correct")


def test_lines_after_a_step_count_from_that_step(tmp_path: Path) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    with LiveView(config, Console(file=output, width=80), clock=clock) as view:
        for row in (ROLLOUTS, STEP, ROLLOUTS):
            append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
            look_every_second(view, clock, 1)
        look_every_second(view, clock, 11)
    assert output.getvalue().splitlines()[-1].endswith(f"s] after step 7: {ROLLOUTS_LINE}")


def test_lines_of_an_evaluation_count_from_its_beginning(tmp_path: Path) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    evaluated = ROLLOUTS | {"activity/rollouts_for_evaluation": 10}
    rows = [evaluated, evaluated, EVALUATION, evaluated]
    with LiveView(config, Console(file=output, width=80), clock=clock) as view:
        for row in rows:
            append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
            look_every_second(view, clock, 1)
        look_every_second(view, clock, 11)
    assert "12 generated, 10 scored (10 for evaluations)" in output.getvalue().splitlines()[-1]
    status = of_rows([*rows, EVALUATION], config, state="complete", now=0.0)
    # A resumed evaluation writes the row of a set again.
    assert status.activity == "" and len(status.evaluations) == 1
    # Training that goes on beside an evaluation is counted on.
    mixed = of_rows([ROLLOUTS, EVALUATION], config, state="running", now=0.0)
    assert "12 generated, 10 scored: " in mixed.activity


def test_plain_log_is_never_silent_for_15_s_and_says_what_is_awaited(tmp_path: Path) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"', "expert.generator.start_timeout_s=180"])
    ready = tmp_path / "generator-0.ready"
    rule = restart_rule(config, "generator", "generator-0", until="trainer")
    rule = dataclasses.replace(rule, ready_path=ready)
    generator = Role("generator-0", [], None, tmp_path, 0, 0.0, restarts=rule)
    # It is restarted too, and has no engine.
    trainer_rule = dataclasses.replace(rule, kind="trainer", ready_path=tmp_path / "none")
    trainer = Role("trainer", [], None, tmp_path, 0, 0.0, restarts=trainer_rule)
    roles = {"generator-0": generator, "trainer": trainer}
    start = {"time": 1.0, "source": "trainer", "step": -1, "model/parameters": 9}
    sync = {"time": 2.0, "source": "trainer", "step": 0, "weight_sync/s": 1.0}
    with LiveView(config, Console(file=output, width=80), clock=clock) as view:
        view.enter_phase("reinforcement learning")
        look_every_second(view, clock, 31, roles)
        ready.touch()
        look_every_second(view, clock, 11, roles)
        append(tmp_path / "metrics.jsonl", json.dumps(start) + "\n")
        look_every_second(view, clock, 11, roles)
        append(tmp_path / "metrics.jsonl", json.dumps(sync) + "\n")
        look_every_second(view, clock, 11, roles)
    lines = output.getvalue().splitlines()
    times = [float(line[1:8]) for line in lines]
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) <= 15
    said = [line[11:] for line in lines[1:]]
    assert said[:3] == [
        f"generator-0 starts its engine (at most 180 s): {seconds} s so far"
        for seconds in (9, 19, 29)
    ]
    assert "trainer ranks load the model" in said[3]
    assert "first weights travel" in said[4] and "first completions" in said[5]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_open_conversations_are_shown_until_none_are(tmp_path: Path, is_terminal: bool) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    shown = []
    console = Console(file=output, width=200, force_terminal=is_terminal)
    with LiveView(config, console, clock=clock) as view:
        for rows in ([HELD], [ROLLOUTS], [IDLE, ROLLOUTS]):
            append(tmp_path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            look_every_second(view, clock, 11)
            shown.append(output.getvalue())
            output.truncate(output.seek(0))
    assert ["conversations open: 12 (" in text for text in shown] == [True, True, False]
    assert ["rollouts: " in text for text in shown] == [False, True, True]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_it_says_what_each_process_waits_for(tmp_path: Path, is_terminal: bool) -> None:
    output, clock = io.StringIO(), Clock()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    waits = "trainer-0 3 waits for the batch of step 2; verifier 7 grades"
    row = {"time": time.time() - 60, "source": "queue", "step": 1, "peers/waits": waits}
    append(tmp_path / "metrics.jsonl", json.dumps(ROLLOUTS) + "\n" + json.dumps(row) + "\n")
    console = Console(file=output, width=200, force_terminal=is_terminal)
    with LiveView(config, console, clock=clock) as view:
        look_every_second(view, clock, 12, {})
    # 67 and 63 s ago by the clock of the row.
    said = r"verifier grades: 1 min \d\d s; trainer-0 waits for the batch of step 2: 1 min 0\d s"
    assert re.search(said, output.getvalue()) and re.search(said, view.awaited)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_likely_fault_is_a_warning_that_outlives_the_table(
    tmp_path: Path, is_terminal: bool
) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    row = ROLLOUTS | {"activity/diagnosis": "Cause: x. Fix: y."}
    append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
    console = Console(file=output, width=120, force_terminal=is_terminal)
    with LiveView(config, console) as view:
        view.refresh({})
        drawn = output.getvalue()
        assert "warning: Cause: x. Fix: y." in drawn
        assert "7 format failures (no_think_start 7)" in drawn
    if is_terminal:
        assert "warning: Cause: x. Fix: y." in output.getvalue()[len(drawn) :]


def test_run_that_ends_by_an_error_says_what_rollouts_came_to(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    row = ROLLOUTS | {"activity/diagnosis": "Cause: x. Fix: y."}
    view = LiveView(config, Console(file=output, width=80))
    with pytest.raises(KeyboardInterrupt), view:
        append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
        view.refresh({})
        raise KeyboardInterrupt
    lines = output.getvalue().splitlines()[-3:]
    assert lines[0].endswith(ROLLOUTS_LINE)
    assert lines[1:] == [
        "warning: Cause: x. Fix: y.", f"The run so far: megatron-rl report {tmp_path}"
    ]  # fmt: skip


def test_fault_that_is_over_is_no_warning_any_more(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"'])
    with LiveView(config, Console(file=output, width=120, force_terminal=True)) as view:
        for text in ("Cause: x.", ""):
            row = ROLLOUTS | {"activity/diagnosis": text}
            append(tmp_path / "metrics.jsonl", json.dumps(row) + "\n")
        view.refresh({})
    assert "warning" not in output.getvalue()


SERVING = ["queue", "generator-0", "verifier"]


def test_engine_that_starts_beside_the_cold_start_is_counted_from_its_start() -> None:
    awaited = Awaited(Config())
    awaited.enter_phase("supervised cold start")
    engine = ["generator-0"]
    assert awaited.text(engine, [*SERVING, "sft"], 100.0) == (
        "trainer ranks load the model: 0 s so far; "
        "generator-0 starts its engine (at most 900 s): 0 s so far"
    )
    awaited.note({"source": "sft", "step": 1, "train/loss": 1.0})
    assert awaited.text(engine, [*SERVING, "sft"], 130.0).startswith(
        "supervised training runs: 0 s"
    )
    awaited.enter_phase("reinforcement learning")
    text = awaited.text(engine, [*SERVING, "trainer"], 140.0)
    assert text == "generator-0 starts its engine (at most 900 s): 40 s so far"


def test_after_the_first_rollouts_the_phase_is_named() -> None:
    awaited = Awaited(Config())
    awaited.enter_phase("evaluation after the last step")
    assert "first completions" in awaited.text([], SERVING, 5.0)
    awaited.note({"source": "queue", "step": 0, "activity/rollouts_scored": 1})
    text = awaited.text([], SERVING, 9.0)
    assert text == "no news, evaluation after the last step continues: 0 s so far"
    assert awaited.text([], SERVING, 12.0).endswith("3 s so far")
