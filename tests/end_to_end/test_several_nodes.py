"""A run on several nodes, here processes: the Slurm script, encrypted sockets, roles apart."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.cli.status import describe, read_status
from megatron_rl.config.files import load_config
from megatron_rl.protocol.checkpoint_folder import complete_checkpoints
from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end.commands import ROOT, start, wait_until, write_inputs

pytestmark = [pytest.mark.slow(120), pytest.mark.timeout(300)]

# No name of the loopback device in protocol/wire.py: treated as reachable from other nodes.
ADDRESS = "127.0.0.2"
STEPS = 3
CONFIG = f"""
[model]
path = "FOLDER/model"
dtype = "float32"
[train]
steps = {STEPS}
prompts_per_batch = 2
group_size = 4
[sampling]
max_new_tokens = 16
[queue]
max_staleness = 1
[generator]
engine = "hf"
max_running = 16
kv_tokens = 2048
context_tokens = 64
[eval]
prompts = 0
[reward]
length_margin_tokens = 16
[reward.tasks.any_text]
format_check = "none"
compare = "exact"
[expert]
train.batch_timeout_s = 60
generator.max_restarts = 0
weights.deadline_s = 20
[[prompts]]
path = "FOLDER/prompts.jsonl"
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts and configuration."""
    return write_inputs(tmp_path_factory.mktemp("nodes"), CONFIG, train=100)


# What srun does for one task on each node.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NNODES=$SLURM_JOB_NUM_NODES
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do
    wait -n || { code=$?; kill "${tasks[@]}"; exit $code; }
done
"""


def prepare(config_path: Path, run_dir: Path, *overrides: str) -> None:
    """The run folder, with keys."""
    done = start("prepare", "--config", str(config_path), "--run-dir", str(run_dir),
                 f"ports.host={ADDRESS}", *overrides)  # fmt: skip
    text, _ = done.communicate(timeout=200)
    assert done.returncode == 0, text


@pytest.mark.exhaustive
def test_a_run_on_three_nodes_trains_and_is_watched_as_on_one(
    config_path: Path, tmp_path: Path
) -> None:
    run_dir, inputs = tmp_path / "a run", config_path.parent
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    # The trainer fills the first node of one GPU, each other one has a generator.
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "SLURM_JOB_NUM_NODES": "3", "HEAD_ADDRESS": ADDRESS, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        "bash", "examples/launch.sh", str(config_path), "--model", str(inputs / "model"),
        "--prompts", str(inputs / "prompts.jsonl"), "--run-dir", str(run_dir),
        "--gpus-per-node", "1", "train.minibatches=2", "generator.replicas=2",
    ]  # fmt: skip
    states, told, second = [], set(), None
    with (tmp_path / "job.log").open("w") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=output, stderr=subprocess.STDOUT,
            env=os.environ | job,
        )  # fmt: skip
        while run.poll() is None:
            if (run_dir / "config.toml").exists():
                status = read_status(run_dir, time.time())
                states.append(status.state)
                told.add(describe(status)[0])
                if status.state == "running" and second is None:
                    second = start("prepare", "--config", str(config_path), "--run-dir",
                                   str(run_dir), f"ports.host={ADDRESS}",
                                   "generator.replicas=2", "train.minibatches=2")  # fmt: skip
            time.sleep(0.1)
    # The last state is a moment before the end: the loop may miss it.
    states.append(read_status(run_dir, time.time()).state)
    assert second is not None
    refusal, _ = second.communicate(timeout=200)
    assert second.returncode == 2 and f"a run is running in {run_dir}: end it" in refusal
    text = (tmp_path / "job.log").read_text()
    assert run.returncode == 0, text
    # What `status` says of a healthy run, from the first process of it to the last.
    assert [state for state, _ in itertools.groupby(states)] == ["prepared", "running", "complete"]
    assert any(line.startswith("running, step 0 of 3, reinforcement learning") for line in told)
    # What one node shows, once: the phase, a line a step, the summary.
    assert len(re.findall(r"^\[ +[\d.]+ s\] reinforcement learning$", text, re.MULTILINE)) == 1
    assert re.findall(r"^step (\d)/3: reward ", text, re.MULTILINE) == ["1", "2", "3"]
    assert len(re.findall(rf"RL steps +{STEPS}, {STEPS * 8} rollouts trained", text)) == 1
    assert "phase 1: training" in (run_dir / "logs" / "launch.log").read_text()
    config = load_config(run_dir / "config.toml")
    assert (config.ports.host, config.train.minibatches) == (ADDRESS, 2)
    keys = config.ports.keys_dir
    assert keys == run_dir / "keys" and keys.stat().st_mode & 0o077 == 0
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert max(row["step"] for row in rows if "train/loss" in row) == STEPS
    outputs = {path.name for path in (run_dir / "logs").glob("*.out")}
    assert outputs == {"queue.out", "trainer.out", "generator-0.out", "generator-1.out",
                       "verifier.out", "verifier-1.out", "verifier-2.out"}  # fmt: skip
    assert (run_dir / "hf" / "final" / "config.json").exists()


# As srun, which returns the largest exit code of its tasks.
SRUN_TO_THE_END = (
    SRUN.replace(
        'wait -n || { code=$?; kill "${tasks[@]}"; exit $code; }',
        'wait "$task" || { code=$?; [ $code -lt ${most:-0} ] || most=$code; }',
    )
    + "exit ${most:-0}\n"
)
SCONTROL = '#!/bin/sh\necho "$@" >>"$CALLS"\n'


@pytest.mark.exhaustive
def test_usr1_saves_a_checkpoint_from_which_the_requeued_job_resumes(
    config_path: Path, tmp_path: Path
) -> None:
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    for name, text in {"srun": SRUN_TO_THE_END, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "CALLS": str(calls),
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "71", "HEAD_ADDRESS": ADDRESS,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def submit(steps: int) -> subprocess.Popen[str]:
        command = ["bash", "examples/launch.sh", str(config_path), "--run-dir", str(run_dir),
                   "--gpus-per-node", "1", f"train.steps={steps}"]  # fmt: skip
        with (tmp_path / "job.log").open("a") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | job, stdout=output, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip

    first = submit(1000)
    # The launcher looks for a finished step every few seconds.
    wait_until(lambda: trained(run_dir) >= 100, first)
    first.send_signal(signal.SIGUSR1)
    code = first.wait(timeout=200)
    text = (tmp_path / "job.log").read_text()
    assert code == 128 + signal.SIGTERM and calls.read_text() == "requeue 71\n", text
    saved = max(complete_checkpoints(run_dir / "checkpoints"))
    assert saved == trained(run_dir)
    assert submit(saved + 1).wait(timeout=200) == 0, (tmp_path / "job.log").read_text()
    assert trained(run_dir) == saved + 1 and calls.read_text() == "requeue 71\n"


def trained(run_dir: Path) -> int:
    """The last step."""
    if not (run_dir / "metrics.jsonl").exists():
        return 0
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return max((row["step"] for row in rows if "train/loss" in row), default=0)


SSH = '#!/bin/sh\n[ "$1" = -n ] && shift 2 && exec bash -c "$*"\n'


@pytest.mark.exhaustive
def test_the_lines_for_ssh_start_a_run(config_path: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "schedulers.md").read_text()
    [lines] = re.findall(r"^```bash\n(RUN=.*?)^```", page, re.MULTILINE | re.DOTALL)
    run_dir = tmp_path / "run"
    for name, meant in {
        "/shared/runs/first": run_dir, "my.toml": config_path, "10.0.0.1": ADDRESS,
        "10.0.0.2": ADDRESS, ".venv/bin/megatron-rl": f"{sys.executable} -m megatron_rl.cli.main",
        # This node has no GPUs to count.
        "--nodes ${#NODES[@]}": "--nodes ${#NODES[@]} --gpus-per-node 1",
    }.items():  # fmt: skip
        assert name in lines
        lines = lines.replace(name, str(meant))
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    host = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", lines], cwd=ROOT, env=os.environ | host, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert max(row["step"] for row in rows if "train/loss" in row) == STEPS, done.stdout
    assert "generator-0" in (run_dir / "logs" / "launch-node-1.log").read_text()


@pytest.mark.exhaustive
def test_surplus_launchers_end_alone_and_a_node_whose_role_dies_ends_the_run(
    config_path: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    prepare(config_path, run_dir, "train.steps=100000")

    def launch(number: int, nodes: int) -> subprocess.Popen[str]:
        """On the first one the trainer and the queue run, on the second one the generator."""
        return start("node", run_dir, "--node", number, "--nodes", nodes, "--gpus-per-node", 1)

    first, node = launch(0, 2), launch(1, 2)
    wait_until(lambda: trained(run_dir) >= 3, first)
    surplus = [launch(1, 2), launch(1, 3)]
    twice, wrong = (one.communicate(timeout=60)[0] for one in surplus)
    assert [one.returncode for one in surplus] == [2, 2], [twice, wrong]
    assert "--node 1 was started twice: another launcher, at 127.0.0.1, has had this" in twice
    assert "--node 1 of --nodes 3, the first one with --nodes 2: use the same" in wrong
    step = trained(run_dir)
    wait_until(lambda: trained(run_dir) >= step + 3, first)
    assert node.poll() is None
    assert "is refused, and the run continues" in read_status(run_dir, time.time()).nodes
    process = psutil.Process(node.pid)
    children = process.children(recursive=True)
    others = psutil.Process(first.pid).children(recursive=True)
    [generator] = [child for child in children if "generation.worker" in child.cmdline()]
    generator.kill()
    text, _ = node.communicate(timeout=60)
    assert node.returncode == 1 and "generator-0 ended with signal 9" in text
    assert not any(child.is_running() for child in children)
    # The other node hears of it, and ends too.
    text, _ = first.communicate(timeout=60)
    assert first.returncode == 1, text
    left = "node 1 has left the run: generator-0 ended with signal 9"
    assert left in text and text.count("is refused, and the run continues") == 2
    assert not any(child.is_running() for child in others)
    assert read_status(run_dir, time.time()).error.startswith(f"launch: {left}")


@pytest.mark.exhaustive
def test_a_scorer_on_a_node_of_its_own_scores_for_the_trainer(
    config_path: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = [
        "algorithm.reference.source=engine", "algorithm.reference.policy=start",
        "algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.1",
        "algorithm.zero_variance_groups=keep",
    ]  # fmt: skip
    prepare(config_path, run_dir, *given)
    # Trainer and queue, generator, scorer: other nodes reach the last one at 127.0.0.1.
    nodes = [
        start("node", str(run_dir), "--node", str(node), "--nodes", "3", "--gpus-per-node", "1")
        for node in range(3)
    ]
    texts = [node.communicate(timeout=250)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], texts
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["scorer/requests"] for row in rows if "scorer/requests" in row] == [8.0] * STEPS
    assert "scorer-0" in (run_dir / "logs" / "launch-node-2.log").read_text()
