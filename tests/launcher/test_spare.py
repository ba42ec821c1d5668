"""A spare node takes the place of a lost node once, and ends with the run."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config, NodesConfig, PortsConfig
from megatron_rl.launcher.node_errors import NodeLost
from megatron_rl.launcher.node_link import FirstNodeLink
from megatron_rl.launcher.nodes import lost_place
from megatron_rl.launcher.placement import NodeRoles, place
from megatron_rl.observe.heartbeat import PREPARED, Heartbeat
from megatron_rl.protocol.node_messages import NodeState
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.stop_request import request_stop
from tests.ports import free_port

LIMITS = NodesConfig(start_timeout_s=20, silence_timeout_s=2)


class Spare(threading.Thread):
    """Waits for a place, and keeps it until it is told to end."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self._run_dir, self.may_end = run_dir, threading.Event()
        self.places: list[int | None] = []
        self.start()

    def run(self) -> None:
        with lost_place(self._run_dir, LIMITS) as place:
            self.places.append(place)
            if place is not None:
                self.may_end.wait(200)


def test_each_loss_is_answered_by_one_spare_and_the_others_end_with_the_run(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, nodes=5) as run:
        spares = [Spare(tmp_path) for _ in range(3)]
        time.sleep(2.5)
        assert [spare.places for spare in spares] == [[], [], []]
        run.lost = {1: 1}
        until = time.monotonic() + 120
        while sum((spare.places for spare in spares), []) != [1] and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(2.5)
        assert sum((spare.places for spare in spares), []) == [1]
        # The spare node is lost too.
        run.lost = {}
        time.sleep(1.5)
        run.lost = {1: 2}
        while sum((spare.places for spare in spares), []) != [1, 1] and time.monotonic() < until:
            time.sleep(0.1)
    for spare in spares:
        spare.may_end.set()
        spare.join(60)
    assert sorted(map(str, sum((spare.places for spare in spares), []))) == ["1", "1", "None"]


KILLED = """
import sys, time
from pathlib import Path
from megatron_rl.config.tree import NodesConfig
from megatron_rl.launcher.nodes import lost_place
with lost_place(Path(sys.argv[1]), NodesConfig()) as place:
    print(place, flush=True)
    time.sleep(600)
"""


def test_the_place_of_a_killed_spare_goes_to_the_next_one_within_a_start(tmp_path: Path) -> None:
    ports = PortsConfig(nodes=free_port(), label="a")
    with Heartbeat(tmp_path, nodes=4) as run, FirstNodeLink(Config(ports=ports), 2) as link:
        registry, silent_s = link.registry, NodesConfig().silence_timeout_s + 1
        registry.may_return = [1]
        registry.note(NodeState(1, 2, "10.0.0.1", session=1, ended=0), 0.0)
        assert registry.find_lost(silent_s) == ""
        run.lost = link.lost
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None and killed.stdout.readline() == "1\n"
            killed.kill()
        registry.note(NodeState(1, 2, "10.0.0.2", session=2, ended=0), silent_s + 1)
        assert link.lost == {}
        assert registry.find_lost(2 * silent_s + 1) == ""
        run.lost, spare = link.lost, Spare(tmp_path)
        until = time.monotonic() + 60
        while not spare.places and time.monotonic() < until:
            time.sleep(0.1)
        spare.may_end.set()
    assert spare.places == [1]


def test_a_spare_misses_a_first_node_that_falls_silent(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, PREPARED), pytest.raises(NodeLost, match="has not renewed"):
        limits = NodesConfig(start_timeout_s=1.5)
        with lost_place(tmp_path, limits):
            pass


def test_a_spare_ends_when_the_run_is_stopped_before_its_first_node_starts(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, PREPARED):
        request_stop(tmp_path)
        with pytest.raises(Interrupted), lost_place(tmp_path, LIMITS):
            pass


def test_spare_nodes_are_the_last_ones_and_have_no_role() -> None:
    config = load_config(None, ["run.dir=R", "parallel.data=2", "expert.nodes.spare=1"])
    roles = place(config, nodes=4, gpus_per_node=1)
    assert [one.trainer_ranks for one in roles] == [1, 1, 0, 0]
    assert [len(one.engines) for one in roles] == [0, 0, 1, 0]
    assert roles[3] == NodeRoles(0, 2, has_verifier=False)
    with pytest.raises(InputError, match="1 spare nodes need 4 nodes .* lower .*nodes.spare"):
        place(config, nodes=3, gpus_per_node=1)
