"""Nodes come and go while a tiny run trains: one joins and leaves, one is killed and is back."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.cli.status import describe, read_status
from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end.commands import launched, start, wait_until, write_inputs
from tests.end_to_end.test_lost_generator import CONFIG, contains

pytestmark = [pytest.mark.slow(250), pytest.mark.exhaustive, pytest.mark.timeout(500)]

# A counted attempt or loss would drop a group. All groups are kept, so that steps are quick.
STRICT = (
    "algorithm.zero_variance_groups=keep", "expert.queue.max_attempts=1",
    "expert.queue.max_lost_attempts=1",
)  # fmt: skip
LEASED_AGAIN = "leasing completions"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts and configuration."""
    return write_inputs(tmp_path_factory.mktemp("joined"), CONFIG, train=10_000)


def generators_of(run_dir: Path) -> set[str]:
    """Generators of the recorded rollouts."""
    files = (run_dir / "rollouts").glob("step_*.jsonl")
    return {row["generator"] for path in files for row in read_jsonl(path)}


def peers(run_dir: Path) -> dict:
    """The last row about live and missing peers."""
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return next((row for row in reversed(rows) if "peers/missing" in row), {})


def audit(run_dir: Path) -> None:
    """The records hold."""
    with launched("audit", run_dir) as found:
        text, _ = found.communicate(timeout=200)
    assert found.returncode == 0, text


def dropped(run_dir: Path) -> set[str]:
    """Reasons of dropped groups."""
    files = (run_dir / "rollouts").glob("dropped_*.jsonl")
    return {row["dropped"] for path in files for row in read_jsonl(path)}


def test_a_node_joins_in_mid_run_is_served_and_leaves_without_a_trace(
    config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = [
        *STRICT, "train.steps=150", "sampling.max_new_tokens=40",
        "expert.nodes.leave_timeout_s=0.05",
    ]  # fmt: skip
    with launched("run", "--config", config, "--run-dir", run_dir, *given) as run:
        wait_until(lambda: contains(run_dir / "metrics.jsonl", "train/loss"), run)
        with launched("join", run_dir, "--verifier") as node:
            wait_until(lambda: "generator-1" in generators_of(run_dir), run)
            told = describe(read_status(run_dir, time.time()))
            assert "nodes 2; node 1 has joined with 1 generator and 1 verifier" in told
            os.kill(node.pid, signal.SIGTERM)
            said, _ = node.communicate(timeout=200)
        assert node.returncode == 0, said
        assert "node 1 joins" in said and "this node has left the run" in said
        wait_until(lambda: peers(run_dir)["peers/generators"] == 1, run)
        output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output
    assert "node 1 leaves the run: the run continues without its 1 generator" in output
    assert peers(run_dir)["peers/missing"] == "" and not (run_dir / "joined/node-1").exists()
    assert LEASED_AGAIN not in (run_dir / "logs/queue.log").read_text()
    assert dropped(run_dir) == set()
    audit(run_dir)


def test_a_serving_node_is_killed_and_comes_back_and_another_one_leaves(
    config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = [
        "train.steps=400", "generator.replicas=2", "ports.host=127.0.0.2",
        "algorithm.zero_variance_groups=keep", "expert.nodes.silence_timeout_s=5",
        "expert.queue.heartbeat_timeout_s=10",
    ]  # fmt: skip
    with launched("prepare", "--config", config, "--run-dir", run_dir, *given) as prepared:
        text, _ = prepared.communicate(timeout=200)
        assert prepared.returncode == 0, text

    def node(number: int) -> subprocess.Popen[str]:
        """The trainer and the queue are on node 0, a generator is on each other one."""
        return start("node", run_dir, "--node", number, "--nodes", 3, "--gpus-per-node", 1)

    def told() -> str:
        return "\n".join(describe(read_status(run_dir, time.time())))

    nodes = [node(number) for number in range(3)]
    run, killed, leaving = nodes
    try:
        wait_until(lambda: {"generator-0", "generator-1"} <= generators_of(run_dir), run)
        killed.kill()
        wait_until(lambda: "node 1 has been silent" in told(), run)
        assert "the run continues without its 1 generator and 1 verifier" in told()
        nodes.append(node(1))
        wait_until(lambda: "node 1 is back" in told(), run)
        wait_until(lambda: peers(run_dir)["peers/missing"] == "", run)
        leaving.terminate()
        said, _ = leaving.communicate(timeout=200)
        assert leaving.returncode == 0, said
        wait_until(lambda: "node 2 leaves the run" in told(), run)
        output, _ = run.communicate(timeout=400)
        assert run.returncode == 0, output
        assert nodes[-1].wait(60) == 0
    finally:
        for one in nodes:
            one.kill()
            one.communicate()
    audit(run_dir)
