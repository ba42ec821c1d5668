"""A trainer on several nodes: which death is the cause, and who starts and kills which ranks."""

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config, NodesConfig, PortsConfig
from megatron_rl.launcher.node_link import FirstNodeLink, OtherNodeLink
from megatron_rl.launcher.node_registry import NodeRegistry, PlaceTaken
from megatron_rl.launcher.placement import place
from megatron_rl.launcher.shared_trainer import Fault, find_fault
from megatron_rl.protocol.node_messages import (
    NodeState,
    PhaseKind,
    RunPhase,
    TrainerOrder,
    TrainerPart,
)
from tests.ports import free_port

RUNS = TrainerPart(2, is_over=False)


def ended(code: int, start: int = 2) -> TrainerPart:
    return TrainerPart(start, exit_code=code, text=f"code {code}")


@pytest.mark.parametrize(
    ("parts", "is_cause_due", "found"),
    [
        ({0: RUNS, 1: RUNS}, False, None),
        ({0: RUNS, 1: ended(-9)}, False, Fault(1, -9, "code -9")),
        # Its ranks failed first because those of node 1 were gone.
        ({0: ended(1), 1: RUNS}, False, None),
        ({0: ended(1), 1: ended(-9)}, False, Fault(1, -9, "code -9")),
        ({0: ended(1), 1: RUNS}, True, Fault(0, 1, "code 1")),
        ({1: ended(1), 0: ended(1)}, False, Fault(0, 1, "code 1")),
        ({0: ended(0), 1: RUNS}, True, None),
        ({0: ended(0), 1: ended(1)}, False, Fault(1, 1, "code 1")),
        # A death in an earlier start is old news.
        ({0: RUNS, 1: ended(-9, start=1)}, True, None),
    ],
)
def test_a_kill_is_the_cause_and_an_error_only_when_no_kill_may_be_behind_it(
    parts: dict[int, TrainerPart], is_cause_due: bool, found: Fault | None
) -> None:
    assert find_fault(parts, 2, is_cause_due=is_cause_due) == found


LIMITS = NodesConfig(silence_timeout_s=10, wait_s=60)


def state(session: int, **changes: object) -> NodeState:
    given = {"node": 1, "nodes": 2, "address": "10.0.0.1", "session": session, "ended": 0}
    return NodeState(**given | changes)


def opened(*, may_return: bool = True) -> NodeRegistry:
    """A registry that hears node 1 at 0 s."""
    registry = NodeRegistry(2, LIMITS, now=0.0)
    registry.note(state(1), 0.0)
    registry.may_return = [1] if may_return else []
    return registry


def test_a_silent_node_of_the_trainer_is_waited_for_and_then_ends_the_run() -> None:
    registry = opened()
    assert registry.find_lost(10.0) == "" and not registry.lost and registry.present == 1
    assert registry.find_lost(11.0) == "" and set(registry.lost) == {1} and registry.present == 0
    why = "node 1 has been silent for 11 s"
    assert registry.take_interruptions() == [why] and registry.take_interruptions() == []
    [event] = registry.take_events()
    assert event.startswith(f"{why}: the trainer waits for it at most 60 s (expert.nodes.wait_s)")
    assert registry.find_lost(71.0) == ""
    wanted = f"{why}, and did not come back within 60 s (expert.nodes.wait_s)"
    assert registry.find_lost(71.1) == wanted
    assert opened(may_return=False).find_lost(11.0) == why


def test_a_node_that_is_back_is_lost_no_more_and_its_earlier_launcher_is_refused() -> None:
    registry = opened()
    registry.find_lost(11.0)
    # Last words that came late change nothing.
    registry.note(state(1, error="the first node has been silent"), 20.0)
    assert registry.find_lost(20.0) == "" and set(registry.lost) == {1}
    registry.take_events(), registry.take_interruptions()
    part = TrainerPart(3, is_over=False)
    registry.note(state(2, trainer=part), 30.0)
    assert not registry.lost and registry.take_events() == ["node 1 is back with no role"]
    assert registry.take_interruptions() == []
    with pytest.raises(PlaceTaken, match="another launcher has taken the place of node 1"):
        registry.note(state(1), 31.0)
    assert registry.parts() == {1: part} and registry.find_lost(31.0) == ""


def test_a_node_that_is_started_again_before_its_end_was_noticed_interrupts_the_trainer() -> None:
    registry = opened()
    # Until 5 s of silence the first launcher may live: the second waits.
    assert not registry.note(state(2), 4.0)
    assert registry.note(state(2), 6.0)
    assert registry.take_interruptions() == ["node 1 was started again"]


def test_an_error_of_a_node_ends_the_run_at_once() -> None:
    registry = opened()
    registry.note(state(1, error="verifier-1 ended"), 1.0)
    assert registry.find_lost(1.0) == "node 1 has left the run: verifier-1 ended"


def test_only_nodes_whose_ranks_alone_are_needed_can_return() -> None:
    scored = ["algorithm.reference.source=engine", "algorithm.kl.coefficient=0.1",
              "algorithm.kl.placement=reward", "algorithm.reference.policy=start"]  # fmt: skip
    config = load_config(None, ["run.dir=R", "parallel.data=2", *scored])
    roles = place(config, nodes=4, gpus_per_node=1)
    assert [one.can_return(config, n) for n, one in enumerate(roles)] == [True, True, False, False]
    given = [
        "run.dir=R", "parallel.data=2", "generator.tensor_parallel=2", "generator.colocate=true",
        "weights.method=folder", "generator.engine=sglang",
    ]  # fmt: skip
    config = load_config(None, given)
    roles = place(config, nodes=2, gpus_per_node=1)
    assert [one.can_return(config, n) for n, one in enumerate(roles)] == [False, False]


RANKS = """
import pathlib, sys, time
from types import SimpleNamespace
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.shared_trainer import RanksHere
from megatron_rl.launcher.supervisor import Supervisor
from megatron_rl.protocol.node_messages import TrainerOrder
folder = pathlib.Path(sys.argv[1])
(folder / 'torchrun.py').write_text('''
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
ignores = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'
ranks = subprocess.Popen([sys.executable, '-c', ignores])
(folder / 'rank').write_text(str(ranks.pid))
while not (folder / 'end').exists():
    time.sleep(0.02)
ranks.kill()
''')
rule = RestartRule('trainer', 1, 60.0, 'queue', folder / 'ready', kind='trainer',
                   only_killed=True, is_shared=True)
with Supervisor(folder / 'logs') as supervisor:
    command = [sys.executable, str(folder / 'torchrun.py'), str(folder)]
    start = lambda: supervisor.start('trainer-node-1', command, restarts=rule)
    here = RanksHere(SimpleNamespace(supervisor=supervisor), 'trainer-node-1', start)
    def obey(start, stop, until):
        deadline = time.monotonic() + 60
        while not until(here.part) and time.monotonic() < deadline:
            here.obey(TrainerOrder(start, stop))
            supervisor.check()
            time.sleep(0.02)
        part = here.part
        print(part.start, part.is_over, part.exit_code, part.text.split('.')[0], flush=True)
    def rank():
        path = folder / 'rank'
        while not path.exists() or not path.read_text():
            time.sleep(0.02)
        pid = path.read_text()
        path.unlink()
        return pathlib.Path('/proc', pid, 'exe')
    # A launcher that is new in start 3, which is over, waits for start 4.
    here.obey(TrainerOrder(3, 3))
    print(here.part.start, here.part.is_over)
    obey(4, 3, lambda part: part.start == 4)
    first = rank()
    obey(4, 4, lambda part: part.is_over)
    print('a rank is left:', first.exists())
    obey(5, 4, lambda part: part.start == 5)
    second = rank()
    supervisor.roles['trainer-node-1'].process.kill()
    obey(5, 4, lambda part: part.is_over)
    print('a rank is left:', second.exists())
    obey(6, 5, lambda part: part.start == 6)
    rank()
    (folder / 'end').touch()
    obey(6, 5, lambda part: part.is_over)
"""


def test_a_node_starts_and_ends_its_ranks_as_ordered_and_tells_how_they_ended(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    killed = f"trainer-node-1 ended with signal {signal.SIGKILL:d}"
    assert done.stdout.splitlines() == [
        "0 True", "4 False None ", f"4 True -9 {killed}; the ranks of all nodes are to start again",
        "a rank is left: False", "5 False None ", f"5 True -9 {killed}", "a rank is left: False",
        "6 False None ", "6 True 0 ",
    ]  # fmt: skip
    log = (tmp_path / "logs/trainer-node-1.out").read_text()
    assert "--- ended with signal 9; start 5 of the trainer ---" in log


def test_a_second_launcher_of_a_trainer_node_is_refused_and_the_run_continues() -> None:
    ports = PortsConfig(nodes=free_port(), label="a")
    cfg = Config(ports=ports, nodes=NodesConfig(silence_timeout_s=60))

    def look(link: FirstNodeLink | OtherNodeLink) -> None:
        time.sleep(0.01)
        link.exchange(time.monotonic())

    with FirstNodeLink(cfg, 2) as first, OtherNodeLink(cfg, 1, 2) as node:
        first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
        first.registry.may_return = [1]
        first.order_trainer(TrainerOrder(start=1))
        until = time.monotonic() + 60
        while node.order.start != 1 and time.monotonic() < until:
            look(first), look(node)
        # Its last words are not those of node 1.
        with OtherNodeLink(cfg, 1, 2) as second:
            with pytest.raises(PlaceTaken, match="--node 1 was started twice"):
                while time.monotonic() < until:
                    look(first), look(node), look(second)
        node.tell_part(TrainerPart(1, is_over=False))
        while first.registry.parts()[1].start != 1 and time.monotonic() < until + 20:
            look(first), look(node)
        assert first.registry.parts() == {1: TrainerPart(1, is_over=False)} and not first.lost
