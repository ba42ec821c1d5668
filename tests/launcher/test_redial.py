"""A node whose connection to the first one carries nothing more connects anew."""

import time
from functools import partial

import pytest

from megatron_rl.config.tree import Config, NodesConfig, PortsConfig
from megatron_rl.launcher import node_link
from megatron_rl.launcher.node_errors import NodeLost
from megatron_rl.launcher.node_link import FirstNodeLink, NodeLink, OtherNodeLink
from megatron_rl.protocol.node_messages import PhaseKind, RunPhase
from tests.cable import Cable
from tests.ports import free_port

REDIAL_S, SILENCE_S = 0.5, 3.0


def config(port: int) -> Config:
    limits = NodesConfig(start_timeout_s=20, silence_timeout_s=SILENCE_S, end_timeout_s=20)
    return Config(ports=PortsConfig(nodes=port, label="a"), nodes=limits)


def look(*links: NodeLink) -> None:
    time.sleep(0.01)
    for link in links:
        link.exchange(time.monotonic())


def test_a_node_connects_anew_and_says_when_that_does_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_link, "REDIAL_S", REDIAL_S)
    monkeypatch.setattr(node_link, "BEAT_S", 0.1)
    first_config = config(free_port())
    cable = Cable(first_config.ports.nodes)
    first, other = FirstNodeLink(first_config, 2), OtherNodeLink(config(cable.port), 1, 2)
    try:
        first.begin(RunPhase(0, PhaseKind.TRAINING), partial(look, first, other))
        phase = other.next_phase(partial(look, first, other))
        assert (phase.kind, cable.connections) == (PhaseKind.TRAINING, 1)
        cable.cut()
        cut_at = time.monotonic()
        # Either end notices a loss by itself after SILENCE_S; neither may.
        while time.monotonic() < cut_at + 2 * SILENCE_S:
            look(first, other)
        # One more that holds; a busy machine may need a second one.
        assert 2 <= cable.connections <= 4
        before = cable.connections
        cable.is_cut_for_ever = True
        with pytest.raises(NodeLost, match="has been silent for 3 s"):
            while time.monotonic() < cut_at + 50:
                look(other)
        assert cable.connections > before + 1
    finally:
        cable.close()
        first.close()
        other.close()
