"""Nodes with own networks: one is cut off for a while, then for ever; one joins, one leaves."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.cli.status import describe, read_status
from megatron_rl.protocol.metrics import read_jsonl, stream_rows
from tests.end_to_end.commands import start, wait_until, write_inputs
from tests.end_to_end.network import network
from tests.end_to_end.test_joined_node import audit, generators_of, peers
from tests.end_to_end.test_lost_generator import CONFIG

pytestmark = [pytest.mark.slow(250), pytest.mark.exhaustive, pytest.mark.timeout(500)]
CUT_S, SILENCE_S, HEARTBEAT_S = 30, 40, 10


def steps_of(run_dir: Path) -> int:
    """Steps that are trained."""
    return sum("train/loss" in row for row in read_jsonl(run_dir / "metrics.jsonl"))


def test_the_run_continues_through_cuts_of_the_network_a_join_and_a_leave(tmp_path: Path) -> None:
    config, run_dir = write_inputs(tmp_path, CONFIG, train=100_000), tmp_path / "run"
    with network(4) as net:
        given = [
            "train.steps=100000", "generator.replicas=2", f"ports.host={net.address(0)}",
            "algorithm.zero_variance_groups=keep", f"expert.nodes.silence_timeout_s={SILENCE_S}",
            f"expert.queue.heartbeat_timeout_s={HEARTBEAT_S}",
        ]  # fmt: skip
        prepare = ["prepare", "--config", config, "--run-dir", run_dir, *given]
        done = start(*prepare, before=net.inside(0))
        said, _ = done.communicate(timeout=200)
        assert done.returncode == 0, said

        def node(number: int) -> subprocess.Popen[str]:
            """The trainer and the queue are on node 0, a generator is on each other one."""
            given = ["node", run_dir, "--node", number, "--nodes", 3, "--gpus-per-node", 1]
            return start(*given, before=net.inside(number))

        def told() -> str:
            return "\n".join(describe(read_status(run_dir, time.time())))

        def trains(steps: int) -> None:
            until = steps_of(run_dir) + steps
            wait_until(lambda: steps_of(run_dir) >= until, run, within_s=60)

        nodes = [node(number) for number in range(3)]
        run, cut, leaving = nodes
        try:
            wait_until(lambda: {"generator-0", "generator-1"} <= generators_of(run_dir), run)
            net.cut(1)
            ends_at = time.monotonic() + CUT_S
            wait_until(lambda: peers(run_dir)["peers/missing"] != "", run)
            trains(3)
            time.sleep(max(0.0, ends_at - time.monotonic()))
            net.heal(1)
            wait_until(lambda: peers(run_dir)["peers/missing"] == "", run)
            # The same launcher and the same engine are back: nothing was started again.
            assert cut.poll() is None and "silent" not in told()
            nodes.append(start("join", run_dir, before=net.inside(3)))
            wait_until(lambda: "generator-2" in generators_of(run_dir), run)
            net.cut(1)
            wait_until(lambda: "node 1 has been silent" in told(), run)
            leaving.terminate()
            said, _ = leaving.communicate(timeout=200)
            assert leaving.returncode == 0, said
            trains(3)
            assert peers(run_dir)["peers/generators"] == 1
            assert "node 2 leaves the run" in told()
            run.send_signal(signal.SIGTERM)
            said, _ = run.communicate(timeout=200)
            assert run.returncode == 128 + signal.SIGTERM, said
            # The node that is cut off notices by itself that the run has gone.
            nodes[1].communicate(timeout=2 * SILENCE_S)
            assert nodes[1].returncode not in (None, 0)
        finally:
            for one in nodes:
                one.kill()
                one.communicate()
    rows = stream_rows(run_dir / "metrics.jsonl")
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    audit(run_dir)
