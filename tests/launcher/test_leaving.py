"""A node that only serves leaves after a signal: its roles end by themselves, the run continues."""

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher import orderly_stop
from megatron_rl.launcher import other_node as other_nodes
from megatron_rl.launcher.node_link import FirstNodeLink
from megatron_rl.launcher.orderly_stop import LeaveOnSignal
from megatron_rl.launcher.other_node import check_folder, other_node
from megatron_rl.launcher.placement import NodeRoles
from megatron_rl.observe.heartbeat import Heartbeat
from megatron_rl.protocol.node_messages import PhaseKind, RunPhase
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.stop_request import request_stop
from tests.ports import free_port

ROLE = """
import signal, sys, time
def leave(number, frame):
    open(sys.argv[1] + "/left", "w").close()
    sys.exit(0)
signal.signal(signal.SIGUSR2, leave)
open(sys.argv[1] + "/ready", "w").close()
time.sleep(600)
"""


class FirstNode(threading.Thread):
    """The launcher of the first node, in a phase of training."""

    def __init__(self, config: Config, nodes: int = 1, started: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._config, self._nodes, self._folder_since = config, nodes, started
        self.events: list[str] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        with FirstNodeLink(self._config, self._nodes) as link:
            link.started = self._folder_since
            link.begin(RunPhase(0, PhaseKind.TRAINING), lambda: None)
            while not self.is_over.wait(0.02):
                link.exchange(time.monotonic())
                self.events += link.registry.take_events()


def test_a_signalled_node_has_its_roles_leave_and_goes(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": tmp_path},
            "ports": {"nodes": free_port(), "label": "a"},
            "nodes": {"leave_timeout_s": 60},
        }
    )
    first, console = FirstNode(config), Console(file=io.StringIO())
    first.start()
    roles = NodeRoles(engines={4: range(0)})
    with other_node(config, console, roles, [], number=1, nodes=1) as node:
        node.supervisor.start("role", [sys.executable, "-c", ROLE, str(tmp_path)])
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() or not first.events:
            assert time.monotonic() < deadline
            node.look()
        os.kill(os.getpid(), signal.SIGTERM)
        while time.monotonic() < deadline:
            node.look()
        pytest.fail("it has not left")
    while len(first.events) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.is_over.set()
    first.join(60)
    assert (tmp_path / "left").exists()
    assert first.events == [
        "node 1 has joined with 1 generator and 1 verifier",
        "node 1 leaves the run: the run continues without its 1 generator and 1 verifier",
    ]
    assert "for at most 60 s" in console.file.getvalue()


def test_a_node_with_a_copy_of_the_run_folder_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_nodes, "VISIBLE_S", 1.0)
    config = Config.model_validate({"ports": {"nodes": free_port(), "label": "a"}})
    # The copy holds the heartbeat of an earlier start.
    for name in ("shared", "copy"):
        (tmp_path / name).mkdir()
        with Heartbeat(tmp_path / name):
            pass
    with Heartbeat(tmp_path / "shared") as run:
        first = FirstNode(config, nodes=3, started=run.started)
        first.start()

        def check(name: str, number: int) -> None:
            given = config.run.model_copy(update={"dir": tmp_path / name})
            own = config.model_copy(update={"run": given})
            console = Console(file=io.StringIO())
            with other_node(own, console, NodeRoles(), [], number=number, nodes=3) as node:
                check_folder(node, node.link.next_phase(node.look))

        check("shared", 1)
        with pytest.raises(InputError, match="copy is not the run folder of the first node"):
            check("copy", 2)
        first.is_over.set()
        first.join(60)


def test_a_node_with_the_last_generator_stops_the_run_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orderly_stop, "_OTHERS_S", 0.0)
    config = Config.model_validate(
        {"run": {"dir": tmp_path}, "ports": {"nodes": free_port(), "label": "a"}}
    )
    first, console = FirstNode(config, nodes=2), Console(file=io.StringIO())
    first.start()
    roles = NodeRoles(engines={0: range(0)})
    with other_node(config, console, roles, [], number=1, nodes=2) as node:
        node.link.next_phase(node.look)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(5):
            node.look()
        assert (tmp_path / "stop").exists()
    first.is_over.set()
    first.join(60)
    assert first.events == []
    said = " ".join(console.file.getvalue().split())
    assert said.count("0 of 1 generators are fewer than generator.min_replicas = 1") == 1


@pytest.mark.parametrize(("ranks", "is_asked"), [(0, False), (0, True), (1, True)])
def test_a_node_that_never_heard_the_first_ends_as_it_is_asked(
    tmp_path: Path, ranks: int, is_asked: bool
) -> None:
    config = Config.model_validate(
        {"run": {"dir": tmp_path}, "ports": {"nodes": free_port(), "label": "a"}}
    )
    roles = NodeRoles(ranks, engines={0: range(0)})
    with (
        pytest.raises(Interrupted) as ended,
        other_node(config, Console(file=io.StringIO()), roles, [], number=1, nodes=2) as node,
    ):
        node.look()
        if is_asked:
            request_stop(tmp_path)
        else:
            os.kill(os.getpid(), signal.SIGINT)
        node.look()
        pytest.fail("it waits on")
    assert ended.value.code == 128 + (signal.SIGTERM if is_asked else signal.SIGINT)


def test_a_second_signal_ends_the_node_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with LeaveOnSignal(tmp_path) as outer:
        with outer:
            os.kill(os.getpid(), signal.SIGTERM)
        # A phase that ends does not change what a signal does.
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_to_all_nodes_stops_the_run_and_no_node_leaves_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orderly_stop, "_OTHERS_S", 0.0)
    with LeaveOnSignal(tmp_path) as stop:
        assert not stop.is_due
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_due
        request_stop(tmp_path)
        assert not stop.is_due
