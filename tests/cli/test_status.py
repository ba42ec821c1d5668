import io
import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_rl.cli import main as cli
from megatron_rl.cli.status import Status, describe, of_rows, read_status
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.launcher.disk import room_warning
from megatron_rl.launcher.live_view import LiveView
from megatron_rl.launcher.run_folder import locked
from megatron_rl.protocol.checkpoint_folder import record_file, seal
from megatron_rl.protocol.metrics import RESUMED
from megatron_rl.protocol.process import Interrupted

CONFIG = load_config(None, ["train.steps=10", "queue.max_staleness=2", "checkpoint.every_steps=2"])


def step(number: int, at: float, **values: Any) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    common = {"queue/groups_trained": 4, "train/loss": 0.1}
    return {"time": at, "source": "trainer", "step": number, **common, **named}


def test_speed_time_left_and_silence_follow_from_the_rows() -> None:
    # Between steps 10, 10, 40 and 10 s: one slow step does not count.
    times = [100.0, 110.0, 120.0, 160.0, 170.0]
    rows = [step(n, at, queue__groups_dropped_zero_variance=n) for n, at in enumerate(times, 1)]
    rows.append({"time": 172.0, "source": "queue", "step": 5, "queue/loop_stalled_s": 1.0})
    rows.append({"time": 50.0, "source": "sft", "step": 9, "train/loss": 1.0})
    status = of_rows(rows, CONFIG, state="running", now=180.0)
    assert (status.step, status.steps, status.step_s, status.left_s) == (5, 10, 10.0, 50.0)
    assert status.silent_s == {"trainer": 10.0, "queue": 8.0}
    assert status.dropped == {"zero_variance": 15} and status.warnings == []
    assert describe(status)[0] == "running, step 5 of 10, 10.0 s a step, about 50 s left"
    # Resumed, it starts its engines first, for which no step tells the time.
    rows.append({"time": 300.0, "source": "launch", "step": 5, RESUMED: 1, "checkpoint": "c"})
    resumed = of_rows(rows, CONFIG, state="running", now=301.0)
    assert describe(resumed)[0] == "running, step 5 of 10, 10.0 s a step"
    rows.append(step(6, 400.0))
    assert of_rows(rows, CONFIG, state="running", now=401.0).left_s == 40.0


def test_engines_and_verifiers_are_counted_and_missing_ones_named() -> None:
    row = {
        "source": "queue", "step": 5, "peers/generators": 1, "peers/generators_wanted": 2,
        "peers/verifiers": 1, "peers/verifiers_wanted": 1, "peers/missing": "generator-1",
    }  # fmt: skip
    status = of_rows([row | {"time": 7.0}], CONFIG, state="running", now=11.0)
    assert "engines 1 of 2, verifiers 1 of 1 (missing: generator-1)" in describe(status)
    assert of_rows([row | {"time": 7.0}], CONFIG, state="stopped", now=11.0).peers == ""


def test_a_cause_cannot_control_the_terminal() -> None:
    said = describe(Status("stopped", 0, 0, error="a\x1b[31m\n  b\x07"))
    assert said == ["stopped", "cause: a [31m\n  b "]


def evaluating(at: float, done: int) -> dict[str, Any]:
    return {
        "time": at, "source": "queue", "step": 2, "activity/seconds": 5.0, "eval/running": "after",
        "eval/completions_done": done, "eval/completions_wanted": 1000,
    }  # fmt: skip


@pytest.mark.parametrize("is_training", [True, False])
def test_a_resumed_run_is_told_by_the_rows_of_its_own_start(is_training: bool) -> None:
    """An evaluation alone is resumed without a row about it."""
    old = [step(1, 0.0), step(2, 10.0), evaluating(20.0, 10), evaluating(80.0, 500)]
    resumed = {"source": "launch", "time": 28_800.0, "step": 2, "launch/resumed": 1}
    old += [resumed] if is_training else []
    started = 0.0 if is_training else 28_800.0
    status = of_rows(old, CONFIG, state="running", now=28_810.0, started=started)
    assert (status.evaluation, status.silent_s, status.step) == ("", {}, 2)
    # 50 completions were scored again at once, then 5 a second.
    rows = [*old, evaluating(28_830.0, 50), evaluating(28_840.0, 100)]
    status = of_rows(rows, CONFIG, state="running", now=28_845.0, started=started)
    assert status.evaluation.endswith("100 of 1,000 completions scored, about 3 min 00 s left")
    assert status.silent_s == {"queue": 5.0}


IDLE = {
    "time": 7.0, "source": "queue", "step": 5, "generator/busy_s": 9.0, "generator/idle_s": 1.0,
    "generator/reporting": 2, "generator/running": 3,
}  # fmt: skip
HELD = IDLE | {
    "generator/turns": 40, "generator/conversations": 12,
    "generator/conversations_in_environment": 9,
}  # fmt: skip


def test_open_conversations_are_told_with_what_they_wait_for() -> None:
    # Two generators, five seconds each.
    assert of_rows([HELD], CONFIG, state="running", now=8.0).generators == (
        "2 generators, 3 completions in flight; conversations open: 12 (waiting for the "
        "environment 9, for the engine 3), turns a minute: 480"
    )
    status = of_rows([HELD, IDLE], CONFIG, state="running", now=8.0)
    assert status.generators == "2 generators, 3 completions in flight"


def test_each_process_is_told_with_what_it_waits_for_and_since_when() -> None:
    waits = (
        "trainer-0 9 waits for the batch of step 6; generator-0 2 generates; "
        "generator-1 70 generates; verifier 12 waits for completions"
    )
    row = {"source": "queue", "step": 5, "peers/waits": waits, "time": 100.0}
    status = of_rows([row], CONFIG, state="running", now=110.0)
    assert status.waits in describe(status) and status.waits == (
        "generator-1 generates: 1 min 20 s, 1 more likewise; verifier waits for completions: 22 s; "
        "trainer-0 waits for the batch of step 6: 19 s"
    )
    assert of_rows([row], CONFIG, state="stopped", now=110.0).waits == ""


def test_an_evaluation_is_complete_with_its_results_and_else_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "evaluation"
    run.mkdir()
    given = ["train.steps=0", "checkpoint.resume=never", f"run.dir={run}"]
    (run / "config.toml").write_text(dump_toml(load_config(None, given)))
    (run / "metrics.jsonl").write_text("")
    (run / "eval.json").write_text("{}")
    assert cli.main(["status", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "complete"
    # Started again, and interrupted.
    with locked(run):
        os.utime(run / "eval.json", (time.time() - 9, time.time() - 9))
    assert cli.main(["status", str(run)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "The same command resumes the evaluation" in shown and "Nothing is saved" not in shown


def test_a_running_evaluation_is_told_with_how_far_it_is() -> None:
    row = {
        "source": "queue", "step": 5, "activity/seconds": 5.0, "eval/running": "step_5",
        "eval/completions_wanted": 64,
    }  # fmt: skip
    rows = [row | {"time": 5.0 * n, "eval/completions_done": 10 * n} for n in (1, 2)]
    status = of_rows(rows, CONFIG, state="running", now=11.0)
    line = "evaluation step_5: 20 of 64 completions scored, about 22 s left"
    assert status.evaluation == line and line in describe(status)
    assert of_rows(rows, CONFIG, state="stopped", now=11.0).evaluation == ""


def test_warnings_come_with_what_to_do() -> None:
    bad = {"train__logprob_gap": 0.3, "queue__staleness_versions_mean": 2.5,
           "queue__groups_dropped_zero_variance": 9, "train__skipped_steps": 1.0}  # fmt: skip
    rows = [step(n, 100.0 + n, **bad) for n in range(1, 4)]
    rows.append({"time": 110.0, "source": "queue", "step": 3, "activity/diagnosis": "Cause: x."})
    status = of_rows(rows, CONFIG, state="running", now=120.0)
    assert status.warnings[0] == "Cause: x."
    staleness, gap, flat, skipped = status.warnings[1:]
    assert (
        "is 2.5 in the latest 3 steps, above 2" in staleness and "queue.max_staleness" in staleness
    )
    assert "above 0.05" in gap and "dtypes" in gap
    assert "is 27 in the latest 3 steps, above 24" in flat and "curriculum" in flat
    assert "optimizer.lr" in skipped


def leave(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(dump_toml(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_state_is_told_by_lock_summary_and_noted_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave(tmp_path / "run", [step(1, time.time())])
    with locked(run):
        assert read_status(run, time.time()).state == "running"
    failures = run / "logs" / "failures"
    failures.mkdir(parents=True)
    note = {"time_s": 5.0, "who": "trainer rank 1", "exit_code": 1, "text": "no\n", "pid": 7}
    (failures / "trainer.json").write_text(json.dumps(note))
    assert cli.main(["status", str(run)]) == 1
    assert "cause: trainer rank 1: no" in capsys.readouterr().out
    (run / "summary.json").write_text("{}")
    assert cli.main(["status", str(run), "--json"]) == 0
    assert Status(**json.loads(capsys.readouterr().out)).state == "complete"


@pytest.mark.parametrize(("number", "words"), [(2, "the user (Ctrl-C)"), (15, "signal 15")])
def test_a_run_that_a_signal_ended_says_so(tmp_path: Path, number: int, words: str) -> None:
    run = leave(tmp_path / "run", [step(3, at=1000.0)])
    with pytest.raises(Interrupted), locked(run):
        raise Interrupted(128 + number)
    found = read_status(run, time.time())
    assert (found.state, found.error) == ("stopped", f"stopped by {words}")


def test_a_stopped_run_says_what_the_same_command_would_do(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", [step(3, at=1000.0)])
    anew = "Nothing is saved: no checkpoint is complete yet (checkpoint.every_steps=2). "
    said = describe(read_status(run, time.time()))
    assert said[-1] == f"{anew}The same command starts the run again."
    checkpoint = run / "checkpoints" / "step_000002"
    partial = checkpoint.with_name("step.partial")
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"0")
    seal(partial, 2, {"weights": record_file(partial / "weights")})
    said = describe(read_status(run, time.time()))
    assert said[-1] == (f"The same command resumes the run after step 2 of 10, from {checkpoint}.")
    with locked(run):
        assert read_status(run, time.time()).rerun == ""


def test_a_stopped_run_on_several_nodes_names_the_commands_of_the_nodes(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", [step(3, at=1000.0)])
    with pytest.raises(Interrupted), locked(run, nodes=3):
        raise Interrupted(143)
    said = describe(read_status(run, time.time()))[-1]
    assert said.endswith(
        f"Run `megatron-rl prepare` again, then `megatron-rl node {run} --nodes 3 --node N` on "
        "each node: that starts the run again."
    )


def test_a_disk_that_becomes_full_is_warned_about_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave(tmp_path / "run", [step(4, time.time())])
    (run / "rollouts").mkdir()
    # Steps 1 to 3 have 600 bytes each in three files; the latest one is being written.
    for name, size in {"step_{}.jsonl": 100, "step_{}.int32": 300, "trained_{}.0.npz": 200}.items():
        for number in (1, 2, 3):
            (run / "rollouts" / name.format(f"{number:06d}")).write_bytes(b"0" * size)
    (run / "rollouts" / "step_000004.jsonl").write_bytes(b"0" * 5)
    (run / "rollouts" / "eval_before.jsonl").write_bytes(b"0" * 10_000)
    partial = run / "checkpoints" / "step.partial"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"0" * 1_500)
    seal(partial, 2, {"weights": record_file(partial / "weights")})
    saved = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"dir": run})})
    said = f"the disk of {run} has 4.5e-06 GB free, room for 5 more steps of 6e-07 GB and the"
    for free, is_enough in ((5_100, True), (4_500, False)):
        usage = shutil.disk_usage(run)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        # 6 of its 10 steps are left: 3,600 bytes, and a checkpoint.
        assert ("the disk of" in str(read_status(run, time.time()).warnings)) is not is_enough
        output = io.StringIO()
        with LiveView(saved, Console(file=output)) as view:
            view.refresh({})
        assert (said in output.getvalue()) is not is_enough
        monkeypatch.undo()
    thinned = load_config(run / "config.toml", ["queue.keep_tokens_of_steps=2"])
    (run / "config.toml").write_text(dump_toml(thinned))
    # From now on a step adds its 100 bytes of text, and old token files go.
    for free, is_enough in ((2_100, True), (2_000, False)):
        usage = shutil.disk_usage(run)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        warnings = str(read_status(run, time.time()).warnings)
        assert ("5 more steps of 1e-07 GB" in warnings) is not is_enough


def test_the_size_of_a_step_is_that_of_the_newest_in_a_long_run_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = leave(tmp_path / "run", [step(4, time.time())])
    (run / "rollouts").mkdir()
    numbers = [*range(0, 3_000, 2), *range(1, 3_000, 2)]
    for number in numbers:
        size = 100 if 2_994 <= number < 2_999 else 1_000
        for name in ("step_{:06d}.jsonl", "step_{:06d}.int32"):
            (run / "rollouts" / name.format(number)).write_bytes(b"0" * size)
    usage = shutil.disk_usage(run)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    tracemalloc.start()
    warning = room_warning(run, CONFIG, left_steps=6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "room for 5 more steps of 2e-07 GB" in warning
    # A path has some 300 bytes; there are 6,000. The numbers of steps have 100 each.
    assert peak < 100 * len(numbers) + 200_000


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "holds no run" in caplog.text


def test_a_run_before_its_first_step_says_what_it_does() -> None:
    row = {"time": 10.0, "source": "queue", "step": 0, "activity/rollouts_generated": 5,
           "activity/rollouts_scored": 4, "activity/seconds": 2.0, "activity/tokens": 80,
           "activity/reason/correct": 4, "activity/completions_in_flight": 3}  # fmt: skip
    status = of_rows([row], CONFIG, state="running", now=11.0)
    assert status.step == 0 and status.left_s is None
    assert "5 generated, 4 scored" in status.activity and "40 generated tok/s" in status.activity
    assert status.activity.startswith("before the first step: rollouts: 5 generated")


def test_what_follows_the_last_step_is_labelled_and_a_missing_gap_explained() -> None:
    step = {"time": 9.0, "source": "trainer", "step": 3, "train/loss": 0.5,
            "train/tokens_per_s": 70.0}  # fmt: skip
    evaluated = {"time": 10.0, "source": "queue", "step": 3, "activity/rollouts_generated": 4,
                 "activity/rollouts_for_evaluation": 4, "activity/rollouts_scored": 4,
                 "activity/seconds": 2.0, "activity/tokens": 80}  # fmt: skip
    status = of_rows([step, evaluated], CONFIG, state="complete", now=11.0)
    assert status.activity.startswith("after step 3: rollouts: 4 generated, 4 scored (4 for evalua")
    assert "trainer tok/s 70" in status.last_step and "40 generated tok/s" in status.activity
    assert status.last_step.endswith("no token of the step was sampled under the current policy "
                                     "version)")  # fmt: skip
    measured = of_rows([step | {"train/logprob_gap": 0.25}], CONFIG, state="complete", now=11.0)
    assert "gap 0.2500" in measured.last_step and "no token" not in measured.last_step
