"""Running a sweep: real child processes that leave run folders as `megatron-rl run` does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from megatron_rl.cli.sweep import run_here
from megatron_rl.config.errors import InputError
from megatron_rl.launcher import run_folder
from megatron_rl.launcher.run_folder import locked
from megatron_rl.sweep.runner import last_line
from tests.sweep.child import CALLS
from tests.sweep.places import SWEEP, child_command, plan_of, write_sweep

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100.0


def run(folder: Path, text: str = SWEEP) -> int:
    return run_here(plan_of(folder, text), Console(), child_command)


def calls(folder: Path) -> list[str]:
    path = folder / "sweep" / CALLS
    return path.read_text().splitlines() if path.exists() else []


def states(folder: Path) -> dict[tuple[str, int], tuple[str, str]]:
    runs = json.loads((folder / "sweep" / "sweep.json").read_text())["runs"]
    return {(run["variant"], run["seed"]): (run["state"], run["reason"]) for run in runs}


def test_runs_one_after_the_other_and_never_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    order = ["start low 0", "start high 0", "start low 1", "start high 1"]
    assert calls(tmp_path) == order
    assert set(states(tmp_path).values()) == {("complete", "")}
    assert run(tmp_path) == 0
    assert calls(tmp_path) == order
    assert capsys.readouterr().out.count("complete, not repeated") == 4
    # Accuracies are 0.25, 0.26 and 0.5, 0.51.
    figures = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["figures"]
    assert [figure["estimate"]["mean"] for figure in figures] == pytest.approx([0.255, 0.505])
    assert figures[1]["estimate"]["standard_error"] == pytest.approx(0.005)
    assert figures[1]["difference"]["difference"]["mean"] == pytest.approx(0.25)


def test_a_failed_run_is_named_with_its_reason_and_tried_again_the_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of(tmp_path)
    (tmp_path / "sweep" / "fail-low").touch()
    assert run(tmp_path) == 1
    reason = "exit code 1: the model folder m is no model"
    assert states(tmp_path)["low", 0] == ("failed", reason)
    assert states(tmp_path)["high", 1] == ("complete", "")
    text = capsys.readouterr().out
    assert f"low seed 0: failed: {reason}" in text and "2 of 4 runs are complete" in text
    log = tmp_path / "sweep" / "low" / "seed-0" / "logs" / "run.out"
    assert "Traceback of many lines" in log.read_text()
    (tmp_path / "sweep" / "fail-low").unlink()
    assert run(tmp_path) == 0
    assert calls(tmp_path)[4:] == ["start low 0", "start low 1"]
    assert set(states(tmp_path).values()) == {("complete", "")}


def test_a_reason_cannot_steer_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "run.out"
    log.write_text("earlier\nmegatron-rl: no \x1b[2Jmodel\n \n")
    assert last_line(log, len("earlier\n")) == "no  [2Jmodel"
    with log.open("a") as file:
        file.write("megatron-rl: Nothing is saved: why. The same command starts the run again.\n")
    assert last_line(log, len("earlier\n")) == "no  [2Jmodel"


def test_a_run_over_its_time_is_ended_and_counts_as_failed(tmp_path: Path) -> None:
    plan_of(tmp_path)
    (tmp_path / "sweep" / "hang-low").touch()
    # Long enough for the others, which start Python and end.
    text = SWEEP.replace("timeout_s = 60", "timeout_s = 15").replace("[0, 1]", "[0]")
    assert run(tmp_path, text) == 1
    assert calls(tmp_path) == ["start low 0", "hanging low", "ended low", "start high 0"]
    assert states(tmp_path)["low", 0] == ("failed", "ended after timeout_s=15 s")


def test_a_child_that_ends_well_without_a_summary_has_failed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, SWEEP.replace("[0, 1]", "[0]"))
    assert run_here(plan, Console(), lambda run: [sys.executable, "-c", ""]) == 1
    assert "does not say that it took all steps" in states(tmp_path)["high", 0][1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sweep_ends_its_run_in_good_order_and_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = write_sweep(tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "hang-high").touch()
    sweep = start_sweep(file, tmp_path / "sweep")
    wait_for_call(tmp_path, sweep, "hanging high")
    children = psutil.Process(sweep.pid).children(recursive=True)
    sweep.send_signal(number)
    output, _ = sweep.communicate(timeout=WAIT_S)
    assert sweep.returncode == 128 + number, output
    assert "Interrupted. The same command resumes" in output
    assert len(children) == 1 and not children[0].is_running()
    assert calls(tmp_path)[-1] == "ended high"
    assert states(tmp_path)["high", 0] == ("interrupted", "")
    (tmp_path / "sweep" / "hang-high").unlink()
    assert run(tmp_path) == 0
    assert calls(tmp_path)[4:] == ["start high 0", "start low 1", "start high 1"]


def test_killed_sweep_leaves_no_child(tmp_path: Path) -> None:
    file = write_sweep(tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "hang-low").touch()
    sweep = start_sweep(file, tmp_path / "sweep")
    wait_for_call(tmp_path, sweep, "hanging low")
    [child] = psutil.Process(sweep.pid).children()
    sweep.kill()
    sweep.communicate(timeout=WAIT_S)
    psutil.wait_procs([child], timeout=WAIT_S)
    assert not child.is_running() and calls(tmp_path)[-1] == "ended low"


def test_two_sweeps_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_LOCK_WAIT_S", 0.3)
    plan = plan_of(tmp_path)
    with locked(plan.sweep_dir), pytest.raises(InputError, match="a sweep is already running in"):
        run_here(plan, Console(), child_command)
    assert calls(tmp_path) == []


def start_sweep(file: Path, sweep_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.sweep.places", str(file), str(sweep_dir)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def wait_for_call(folder: Path, sweep: subprocess.Popen[str], line: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while line not in calls(folder):
        assert sweep.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
