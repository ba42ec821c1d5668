"""A trainer on several nodes, here two launchers, whose ranks, torchrun and nodes are killed."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_rl.cli.status import describe, read_status
from tests.end_to_end import commands
from tests.end_to_end.commands import start, wait_until, write_inputs
from tests.end_to_end.test_lost_generator import CONFIG, check_trained, contains, restarts
from tests.end_to_end.test_restarted_trainer import (
    EVERY,
    STEPS,
    check_repeated,
    kill_torchrun,
    processes_of,
    taken,
)

pytestmark = [pytest.mark.slow(200), pytest.mark.exhaustive, pytest.mark.timeout(500)]

NODES = 2
GIVEN = [
    "ports.host=127.0.0.2", "generator.colocate=true", "weights.method=folder",
    f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}", "train.deterministic=true",
    "expert.train.restart_window_s=5", "expert.nodes.silence_timeout_s=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts and configuration."""
    return write_inputs(tmp_path_factory.mktemp("shared"), CONFIG, train=1000)


def node(run_dir: Path, number: int, nodes: int) -> subprocess.Popen[str]:
    """A rank of the trainer on each node but spare ones; queue and generator are on the first."""
    return start("node", run_dir, "--node", number, "--nodes", nodes, "--gpus-per-node", 1)


@contextmanager
def launched(
    config: Path, run_dir: Path, *given: str, nodes: int = NODES
) -> Iterator[list[subprocess.Popen[str]]]:
    """The launchers of all nodes; they and their processes are ended with the block."""
    with commands.launched(
        "prepare", "--config", config, "--run-dir", run_dir, *GIVEN, *given
    ) as prepared:
        text, _ = prepared.communicate(timeout=200)
        assert prepared.returncode == 0, text
    started = [node(run_dir, number, nodes) for number in range(nodes)]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def audit(run_dir: Path) -> None:
    """The records hold."""
    with commands.launched("audit", run_dir) as found:
        text, _ = found.communicate(timeout=200)
    assert found.returncode == 0, text


def kill_rank(run: subprocess.Popen[str]) -> None:
    torchrun = "megatron_rl.trainer.torchrun"
    ranks = processes_of(run, "megatron_rl.trainer.train", without=torchrun)
    os.kill(ranks[-1].pid, signal.SIGKILL)


def told(run_dir: Path) -> str:
    return "\n".join(describe(read_status(run_dir, time.time())))


@pytest.mark.parametrize("given", ["parallel.data=2", "parallel.tensor=2"], ids=["dp2", "tp2"])
def test_all_nodes_repeat_the_steps_since_the_checkpoint_when_a_rank_of_any_is_killed(
    config: Path, tmp_path: Path, given: str
) -> None:
    run_dir = tmp_path / "run"
    kills = [(3, kill_rank, 1), (7, kill_torchrun, 0), (9, kill_rank, 0)]
    with launched(config, run_dir, given) as nodes:
        run = nodes[0]
        for count, (step, kill, number) in enumerate(kills, 1):
            wait_until(lambda step=step: any(r["step"] >= step for r in taken(run_dir)), run)
            kill(nodes[number])
            wait_until(lambda count=count: len(restarts(run_dir, "trainer")) == count, run)
        output, _ = run.communicate(timeout=200)
        assert run.returncode == 0, output
        said, _ = nodes[1].communicate(timeout=200)
        assert nodes[1].returncode == 0, said
    rows = restarts(run_dir, "trainer")
    assert [row["role"] for row in rows] == ["trainer-node-1", "trainer", "trainer"]
    assert {row["exit_code"] for row in rows} == {-signal.SIGKILL}
    check_repeated(run_dir)
    check_trained(run_dir, STEPS)
    # Nobody else noticed it, and nothing was generated again.
    assert not restarts(run_dir) + restarts(run_dir, "queue") + restarts(run_dir, "verifier")
    assert not contains(run_dir / "logs/queue.log", "leasing completions")
    audit(run_dir)


@pytest.mark.parametrize("spare", [0, 1])
def test_the_trainer_waits_for_a_node_that_was_killed_and_continues_when_its_place_is_taken(
    config: Path, tmp_path: Path, spare: int
) -> None:
    run_dir, given = tmp_path / "run", ["parallel.data=2", f"expert.nodes.spare={spare}"]
    with launched(config, run_dir, *given, nodes=NODES + spare) as nodes:
        run, lost = nodes[:NODES]
        wait_until(lambda: any(row["step"] >= 3 for row in taken(run_dir)), run)
        lost_processes = psutil.Process(lost.pid).children(recursive=True)
        lost.kill()
        wait_until(lambda: "the trainer waits for it" in told(run_dir), run)
        if not spare:
            psutil.wait_procs(lost_processes, timeout=60)
            nodes.append(node(run_dir, 1, NODES))
        wait_until(lambda: len(restarts(run_dir, "trainer")) == 1, run)
        output, _ = run.communicate(timeout=200)
        assert run.returncode == 0, output
        assert nodes[-1].wait(60) == 0
    assert "node 1 has been silent" in output and "node 1 is back with 1 verifier" in output
    check_repeated(run_dir)
    check_trained(run_dir, STEPS)
    assert not restarts(run_dir) + restarts(run_dir, "queue")
    audit(run_dir)


def test_a_run_whose_lost_node_does_not_come_back_ends_and_resumes(
    config: Path, tmp_path: Path
) -> None:
    run_dir, given = tmp_path / "run", ["parallel.data=2", "expert.nodes.wait_s=5"]
    with launched(config, run_dir, *given) as nodes:
        run, lost = nodes
        wait_until(lambda: any(row["step"] >= EVERY + 1 for row in taken(run_dir)), run)
        lost.kill()
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 1, output
    assert "did not come back within 5 s (expert.nodes.wait_s)" in output
    assert f"resumes the run after step {EVERY} of {STEPS}" in output
    with launched(config, run_dir, *given) as nodes:
        output, _ = nodes[0].communicate(timeout=200)
        assert nodes[0].returncode == 0, output
        assert nodes[1].wait(60) == 0
    check_trained(run_dir, STEPS)
    audit(run_dir)
