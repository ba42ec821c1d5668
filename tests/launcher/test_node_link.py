"""Nodes begin each phase together, and none goes on without the others."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from megatron_rl.config.tree import Config, NodesConfig, PortsConfig
from megatron_rl.launcher import node_link
from megatron_rl.launcher.node_errors import NodeFailed, NodeLost
from megatron_rl.launcher.node_link import FirstNodeLink, OtherNodeLink
from megatron_rl.launcher.node_registry import PlaceTaken
from megatron_rl.observe.deaths import RoleDied
from megatron_rl.protocol.node_messages import NodeState, PhaseKind, RoleRestart, RunPhase
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.wire import TurnedAway
from tests.lossy_router import LINKS, Loss, LossyRouter
from tests.ports import free_port


def config(label: str = "a", **limits: float) -> Config:
    found = {"start_timeout_s": 60.0, "silence_timeout_s": 60.0, "end_timeout_s": 60.0, **limits}
    return Config(ports=PortsConfig(nodes=free_port(), label=label), nodes=NodesConfig(**found))


def look(link: FirstNodeLink | OtherNodeLink) -> None:
    time.sleep(0.01)
    link.exchange(time.monotonic())


class Follower(threading.Thread):
    """Another node: notes each phase that begins, works for a moment, and ends as it is told."""

    def __init__(self, cfg: Config, node: int, nodes: int, *, work_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._open = partial(OtherNodeLink, cfg, node, nodes)
        self.work_s = work_s
        self.phases: list[RunPhase] = []
        self.ended: list[tuple[PhaseKind, float]] = []
        self.raises: BaseException | None = None
        """What it leaves its next phase with."""
        self.is_killed = False
        self.error: BaseException | None = None

    def run(self) -> None:
        link = self._open()
        try:
            if not self.is_killed:
                with link:
                    self._follow(link)
        except (NodeLost, PlaceTaken, TurnedAway, RuntimeError, Interrupted) as error:
            self.error = error

    def _follow(self, link: OtherNodeLink) -> None:
        while (phase := link.next_phase(partial(look, link))).kind != PhaseKind.END:
            self.phases.append(phase)
            until = time.monotonic() + self.work_s
            while time.monotonic() < until:
                look(link)
                if self.is_killed:
                    # As by SIGKILL: nothing is said any more, and the socket is gone.
                    link._dealer.close()
                    link.leave = lambda error: None
                    raise RuntimeError("killed")
            if self.raises is not None:
                raise self.raises
            while not link.is_ending:
                look(link)
            self.ended.append((phase.kind, time.monotonic()))


@contextmanager
def followers(cfg: Config, nodes: int, **settings: float) -> Iterator[list[Follower]]:
    with ExitStack() as stack:
        found = [Follower(cfg, node, nodes, **settings) for node in range(1, nodes)]
        for one in found:
            one.start()
            stack.callback(one.join, 60)
        yield found


def test_no_phase_begins_before_all_nodes_have_ended_the_one_before() -> None:
    cfg = config()
    with followers(cfg, 3, work_s=0.3) as others, FirstNodeLink(cfg, 3) as first:
        begun = {}
        wanted = [
            (PhaseKind.COLD_START, ""),
            (PhaseKind.EVALUATION, "step_1"),
            (PhaseKind.TRAINING, ""),
        ]
        for kind, label in wanted:
            phase = first.begin(RunPhase(0, kind, label=label), partial(look, first))
            begun[kind] = time.monotonic()
            assert first.is_ending is False
            first.end_phase()
            assert first.is_ending
            assert (phase.kind, phase.number) == (kind, len(begun))
        first.begin(RunPhase(0, PhaseKind.END), partial(look, first))
        for one in others:
            one.join(60)
            assert not one.is_alive() and one.error is None
            assert [(phase.kind, phase.label) for phase in one.phases] == wanted
            assert [phase.number for phase in one.phases] == [1, 2, 3]
            ended = dict(one.ended)
            assert ended[PhaseKind.COLD_START] <= begun[PhaseKind.EVALUATION]
            assert ended[PhaseKind.EVALUATION] <= begun[PhaseKind.TRAINING]


def test_the_first_node_hears_once_of_each_restart_elsewhere() -> None:
    cfg = config()
    wanted = [RoleRestart("generator-3", "generator", -9, n, 3, n) for n in range(1, 101)]
    with FirstNodeLink(cfg, 2) as first, OtherNodeLink(cfg, 1, 2) as other:
        heard: list[RoleRestart] = []
        for restart in wanted:
            other.tell_restart(restart)
            look(other)
            look(first)
            heard += first.registry.take_restarts()
        for _ in range(200):
            if len(heard) == len(wanted):
                break
            look(other)
            look(first)
            heard += first.registry.take_restarts()
        assert heard == wanted
        # What it says from now on holds the same ones.
        for _ in range(3):
            other._say()
            look(first)
        assert first.registry.take_restarts() == []


def test_nodes_know_what_the_others_have_given_up_and_whom_the_queue_misses() -> None:
    cfg = config()
    with FirstNodeLink(cfg, 2) as first, OtherNodeLink(cfg, 1, 2) as second:
        first.given_up, second.given_up = {"generator": 1}, {"generator": 2, "verifier": 1}
        first.missing = ["verifier-1"]
        first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
        until = time.monotonic() + 60
        while not (first.given_up_elsewhere and second.missing) and time.monotonic() < until:
            look(first)
            look(second)
        assert first.given_up_elsewhere == {"generator": 2, "verifier": 1}
        assert (second.given_up_elsewhere, second.missing) == ({"generator": 1}, ["verifier-1"])


def word(message: NodeState | RunPhase) -> str:
    """What a message says first: a state and a phase are said again and again."""
    if message.error:
        return f"{type(message).__name__} error"
    if isinstance(message, NodeState):
        return f"NodeState {message.ended}"
    return f"RunPhase {message.kind}{message.is_ending:+}"


WORDS = {
    "NodeState 0", "NodeState 1", "NodeState 2",
    "RunPhase evaluation+0", "RunPhase evaluation+1", "RunPhase training+0", "RunPhase training+1",
    "RunPhase end+0",
}  # fmt: skip


def test_a_run_outlives_the_first_loss_of_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one.split()[0] for one in WORDS} == set(LINKS["nodes"])
    cfg, loss = config(), Loss(set(WORDS), word)
    monkeypatch.setattr(node_link, "BEAT_S", 0.1)
    monkeypatch.setattr(node_link, "Router", partial(LossyRouter, loss=loss))
    with followers(cfg, 2) as (one,):
        with FirstNodeLink(cfg, 2) as first:
            for kind in (PhaseKind.EVALUATION, PhaseKind.TRAINING):
                first.begin(RunPhase(0, kind), partial(look, first))
                until = time.monotonic() + 60
                while kind not in [phase.kind for phase in one.phases]:
                    assert time.monotonic() < until
                    look(first)
                first.end_phase()
            first.end_run(partial(look, first))
        one.join(60)
        assert not one.is_alive() and one.error is None
    assert [kind for kind, _ in one.ended] == [PhaseKind.EVALUATION, PhaseKind.TRAINING]
    assert loss.kinds == sorted(WORDS)


def test_last_words_that_are_lost_are_missed_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(silence_timeout_s=3.0)
    loss = Loss({"NodeState error", "RunPhase error"}, word)
    monkeypatch.setattr(node_link, "BEAT_S", 0.1)
    monkeypatch.setattr(node_link, "Router", partial(LossyRouter, loss=loss))
    with followers(cfg, 3, work_s=0.2) as (one, two):
        one.raises = RuntimeError("a role died")
        with (
            pytest.raises(NodeLost, match="node 1 has been silent"),
            FirstNodeLink(cfg, 3) as first,
        ):
            first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
            raise lose(first, within_s=60)
        one.join(60)
        two.join(60)
        assert isinstance(two.error, NodeLost)
    assert loss.kinds == ["NodeState error", "RunPhase error"]


def lose(first: FirstNodeLink, within_s: float) -> NodeLost | NodeFailed:
    started = time.monotonic()
    with pytest.raises((NodeLost, NodeFailed)) as found:
        while time.monotonic() - started < within_s:
            look(first)
    return found.value


def test_a_node_that_a_signal_ends_ends_all_others_with_its_exit_code() -> None:
    cfg = config()
    with followers(cfg, 3, work_s=0.2) as (one, two):
        one.raises = Interrupted(128 + 2)
        with pytest.raises(Interrupted) as ended, FirstNodeLink(cfg, 3) as first:
            first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
            until = time.monotonic() + 60
            while time.monotonic() < until:
                look(first)
        two.join(60)
        assert isinstance(two.error, Interrupted) and ended.value.code == two.error.code == 130


@pytest.mark.parametrize(
    ("error", "as_the_first"),
    [(RuntimeError("a fault of the launcher"), NodeLost),
     (NodeLost("the first node has been silent for 4 s"), NodeLost),
     # The next start does not continue the queue's ledger.
     (RoleDied("generator-1", -9, "generator-1 ended with signal 9"), NodeFailed)],
)  # fmt: skip
def test_a_node_that_leaves_with_an_error_ends_all_others(
    error: BaseException, as_the_first: type[BaseException]
) -> None:
    cfg, said = config(), str(error)
    with followers(cfg, 3, work_s=0.2) as (one, two):
        one.raises = error
        with pytest.raises(as_the_first, match=said), FirstNodeLink(cfg, 3) as first:
            first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
            raise lose(first, within_s=60)
        one.join(60)
        two.join(60)
        # The first node passes it on.
        assert isinstance(two.error, NodeLost)
        assert str(two.error) == f"the first node has left the run: node 1 has left the run: {said}"


def test_a_node_that_falls_silent_is_missed_by_the_first_and_so_by_all() -> None:
    cfg = config(silence_timeout_s=4.0)
    with followers(cfg, 3, work_s=60.0) as (one, two):
        with pytest.raises(NodeLost), FirstNodeLink(cfg, 3) as first:
            first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
            while not (one.phases and two.phases):
                look(first)
            one.is_killed = True
            lost = lose(first, within_s=60)
            assert str(lost) == "node 1 has been silent for 4 s"
            raise lost
        two.join(60)
        assert "node 1 has been silent" in str(two.error)


def test_launchers_without_a_place_are_refused_and_the_others_continue() -> None:
    cfg = config()
    with followers(cfg, 2) as (one,), FirstNodeLink(cfg, 2) as first:
        first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
        while not one.phases:
            look(first)
        refused = [Follower(cfg, 1, nodes) for nodes in (2, 3)]
        for launcher in refused:
            launcher.start()
        until = time.monotonic() + 60
        while any(launcher.is_alive() for launcher in refused) and time.monotonic() < until:
            look(first)
        assert [type(launcher.error) for launcher in refused] == [PlaceTaken, PlaceTaken]
        twice, wrong = (str(launcher.error) for launcher in refused)
        assert "the run continues without it: --node 1 was started twice" in twice
        assert "was started as --node 1 of --nodes 3, the first one with --nodes 2" in wrong
        assert not any(launcher.phases for launcher in refused)
        first.end_phase()
        first.end_run(partial(look, first))
        one.join(60)
        assert one.error is None and [kind for kind, _ in one.ended] == [PhaseKind.TRAINING]


def test_a_launcher_that_waits_for_a_dead_one_hears_how_the_run_ends() -> None:
    cfg = config(silence_timeout_s=4.0)
    with followers(cfg, 2, work_s=60.0) as (killed,):
        second = Follower(cfg, 1, 2)
        with pytest.raises(NodeLost), FirstNodeLink(cfg, 2) as first:
            first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
            while not killed.phases:
                look(first)
            killed.is_killed = True
            second.start()
            raise lose(first, within_s=60)
        second.join(60)
    said = "the first node has left the run: node 1 has been silent for 4 s"
    assert str(second.error) == said and not second.phases


def test_the_others_miss_a_first_node_that_falls_silent() -> None:
    cfg = config(silence_timeout_s=4.0)
    with followers(cfg, 2, work_s=60.0) as (one,):
        first = FirstNodeLink(cfg, 2)
        first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
        while not one.phases:
            look(first)
        first.close()
        one.join(60)
        assert "has been silent for 4 s" in str(one.error)


def test_a_node_that_does_not_end_its_processes_is_named_after_the_deadline() -> None:
    cfg = config(end_timeout_s=1.0)
    with followers(cfg, 2, work_s=2.5) as (one,):
        with pytest.raises(NodeLost) as found, FirstNodeLink(cfg, 2) as first:
            first.begin(RunPhase(0, PhaseKind.EVALUATION), partial(look, first))
            while not one.phases:
                look(first)
            first.end_phase()
            first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
        expected = "nodes [1] have not ended phase 1 (evaluation) 1 s after the first node did"
        assert expected in str(found.value)
        one.join(60)
        assert expected in str(one.error)


def test_a_launcher_of_an_earlier_job_is_turned_away() -> None:
    cfg = config(label="a")
    stale = cfg.model_copy(update={"ports": cfg.ports.model_copy(update={"label": "b"})})
    with FirstNodeLink(cfg, 2) as first, followers(stale, 2) as (one,):
        first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first))
        until = time.monotonic() + 60
        while one.is_alive() and time.monotonic() < until:
            look(first)
        assert isinstance(one.error, TurnedAway) and not one.phases
        assert first.registry.behind(1) == [1]
