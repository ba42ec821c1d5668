"""Schedulers start our commands as they are: Slurm's requeue and containers, with stand-ins for
programs that are not here; the manifests for Kubernetes and SkyPilot, whose shell lines run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# As srun: a task on each node, or on the first; its own options are noted.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLS"
nodes=(0 1)
while [[ $1 == --* ]]; do [ "$1" != --nodes=1 ] || nodes=(0); shift; done
for node in "${nodes[@]}"; do SLURM_NNODES=2 SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $((code))
"""
CONTAINER = """#!/usr/bin/env bash
echo "in $3: ${*:7}" >>"$CALLS"
exec "${@:4}"
"""
# As the launcher: what starts roles lasts until the run is asked to stop.
LAUNCHER = """#!/usr/bin/env bash
[[ " $* " != *" prepare "* ]] || mkdir -p "$FOLDER"
[[ " $* " =~ " node "|" run --config" ]] || exit 0
mkdir -p "$FOLDER"
[ -z "$RUNS" ] || exec $RUNS
[ -z "$STARTS_LATE" ] || { until [ -e "$FOLDER/go" ]; do sleep 0.05; done; rm "$FOLDER/stop"; }
echo "started ${*:3}" >>"$CALLS"
until [ -e "$FOLDER/stop" ]; do sleep 0.05; done
exit "$ENDS"
"""
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >>"$CALLS"\n'


def start(folder: Path, nodes: int, **more: str) -> subprocess.Popen[str]:
    """examples/launch.sh in a Slurm job whose programs are stand-ins."""
    programs = {"python": LAUNCHER, "srun": SRUN, "scontrol": SCONTROL, "apptainer": CONTAINER}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "a.toml").touch()
    job = {
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": f"{folder}/python",
        "CALLS": f"{folder}/calls", "FOLDER": f"{folder}/run", "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": "71", "HEAD_ADDRESS": "10.0.0.1", "ENDS": "143",
        "STARTS_LATE": "", "RUNS": "",
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", str(EXAMPLES / "launch.sh"), "a.toml", "--run-dir", "run"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | job | more,
    )  # fmt: skip


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_roles(job: subprocess.Popen[str], folder: Path, nodes: int) -> None:
    until = time.monotonic() + 60
    while sum(line.startswith("started") for line in calls(folder)) < nodes:
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    # The script's traps come after the start of the roles; that of USR1 is the last one.
    while not catches(job.pid, signal.SIGUSR1):
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.05)


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("sent", "ends", "requeues"),
    [
        (signal.SIGUSR1, 143, True),
        (signal.SIGTERM, 143, False),
        # The run had ended, or failed, before it could stop.
        (signal.SIGUSR1, 0, False),
        (signal.SIGUSR1, 1, False),
    ],
)
def test_usr1_stops_the_run_after_a_checkpoint_and_requeues_its_job(
    tmp_path: Path, nodes: int, sent: signal.Signals, ends: int, requeues: bool
) -> None:
    job = start(tmp_path, nodes, ENDS=str(ends))
    wait_for_roles(job, tmp_path, nodes)
    job.send_signal(sent)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == ends, text
    assert ("scontrol requeue 71" in calls(tmp_path)) == requeues
    assert not [line for line in calls(tmp_path) if "scontrol" in line and not requeues]


def test_a_signal_is_not_lost_while_the_launcher_starts(tmp_path: Path) -> None:
    """`run` removes the request of an earlier start; here it does so after the signal."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    job = start(tmp_path, 1, STARTS_LATE="yes")
    wait_for_roles(job, tmp_path, 0)
    time.sleep(0.2)
    assert not calls(tmp_path)
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    (tmp_path / "run" / "go").touch()
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 143, text
    assert [line.split()[0] for line in calls(tmp_path)] == ["started", "scontrol"]


def test_a_request_to_stop_stays_for_the_launcher_that_owns_the_folder(tmp_path: Path) -> None:
    """`run` refuses a folder in which another job's run is being stopped."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    job = start(tmp_path, 1, ENDS="2")
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 2, text
    assert (tmp_path / "run" / "stop").exists()


# The launcher's own handling of requests and signals, in a training that lasts.
TRAINS = """
import os, time
from pathlib import Path
from megatron_rl.launcher.orderly_stop import OrderlyStop
folder, told = Path(os.environ["FOLDER"]), open(os.environ["CALLS"], "a")
with OrderlyStop(folder, 90.0, 10) as stop:
    print("started", file=told, flush=True)
    while True:
        if stop.check(has_trained=True):
            print("stopping", file=told, flush=True)
        time.sleep(0.1)
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_a_run_on_one_node_at_once(
    tmp_path: Path, second: signal.Signals
) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    trains = f"{sys.executable} {tmp_path}/trains.py"
    job = start(tmp_path, 1, RUNS=trains, PYTHONPATH=str(EXAMPLES.parent))
    wait_for_roles(job, tmp_path, 1)
    job.send_signal(signal.SIGUSR1)
    until = time.monotonic() + 60
    while "stopping" not in calls(tmp_path):
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    # The script repeats its request, which is none to end at once.
    time.sleep(2.5)
    assert job.poll() is None
    job.send_signal(second)
    text, _ = job.communicate(timeout=45)
    assert job.returncode == 143, text
    assert ("scontrol requeue 71" in calls(tmp_path)) == (second == signal.SIGUSR1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_command_runs_in_the_container_that_is_asked_for(tmp_path: Path, nodes: int) -> None:
    commands = ["plan", "run --dry-run", "run --config"]
    if nodes == 2:
        commands = ["plan", "prepare", "prepare", "node", "node"]
    for name, given in {
        "apptainer": {"CONTAINER": "apptainer exec --nv=all me.sif"},
        "pyxis": {"SRUN_OPTIONS": "--container-image=me --container-mounts=/shared"},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        job = start(folder, nodes, ENDS="0", **given)
        wait_for_roles(job, folder, nodes)
        (folder / "run" / "stop").touch()
        text, _ = job.communicate(timeout=60)
        assert job.returncode == 0, text
        noted = calls(folder)
        if name == "apptainer":
            inside = [line.removeprefix("in me.sif: ") for line in noted if line.startswith("in ")]
            assert [line[: len(word)] for line, word in zip(inside, commands, strict=True)] == (
                commands
            )
            continue
        # On all nodes srun starts the roles, on the first one the other commands.
        steps = [line for line in noted if line.startswith("srun ")]
        options = "--container-image=me --container-mounts=/shared "
        assert len(steps) == (4 if nodes == 2 else 3) and all(options in step for step in steps)
        alone = [step for step in steps if "--nodes=1 --ntasks=1 --relative=0 " in step]
        assert len(alone) == 3


def test_a_job_that_slurm_starts_again_finds_its_run_folder(tmp_path: Path) -> None:
    """Slurm keeps the number of a job that is requeued."""
    text = (EXAMPLES / "launch.sh").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("RUN_DIR=${RUN_DIR:-")]
    told = subprocess.run(
        ["bash", "-c", f"CONFIGS=(x/my.toml)\nRUN_DIR=\n{line}\necho $RUN_DIR"],
        cwd=tmp_path, env=os.environ | {"SLURM_JOB_ID": "71"}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert told.stdout == f"{tmp_path}/runs/my-71\n"


@pytest.mark.parametrize(
    ("argument", "text"),
    [("--modle=x", "unknown option --modle=x"), ("--gpu-memory", "--gpu-memory needs a value")],
)
def test_what_the_script_does_not_know_is_named(tmp_path: Path, argument: str, text: str) -> None:
    (tmp_path / "a.toml").touch()
    command = ["bash", EXAMPLES / "launch.sh", "a.toml", argument]
    ended = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"launch.sh: {text}\n") and "--gpu-memory GIB" in ended.stderr


def test_the_plan_gets_the_memory_of_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "a.toml").touch()
    options = ["--gpu", "b100", "--gpu-memory", "24"]
    ended = subprocess.run(
        ["bash", EXAMPLES / "launch.sh", "a.toml", *options],
        cwd=tmp_path, text=True, capture_output=True, env=os.environ | {"PYTHON": "echo"},
    )  # fmt: skip
    first, *_ = ended.stdout.splitlines()
    assert first.endswith(" ".join(["plan", str(tmp_path / "a.toml"), *options]))
