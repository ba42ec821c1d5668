"""Generators and verifiers of another phase at a queue: turned away, and never mixed in."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    GeneratorReady,
    Rollout,
    RolloutDone,
    Score,
    ScoreDone,
    VerifierReady,
    VersionSpan,
)
from megatron_rl.protocol.wire import Dealer, TurnedAway
from tests.rollout_queue.scripted_peers import ScriptedPeers, await_sum, start_queue, write_config

PROMPTS, LEASES = 5, 20


def labelled(config: Config, label: str) -> Config:
    ports = config.ports.model_copy(update={"label": label})
    return config.model_copy(update={"ports": ports})


def wrong_rollout(lease_id: int) -> Rollout:
    return Rollout(
        lease_id,
        0,
        np.arange(5, dtype=np.int32),
        np.arange(4, dtype=np.int32),
        np.zeros(4, np.float32),
        [VersionSpan(0, 0, 4)],
        "stop",
        "no answer to this prompt",
    )


def test_workers_of_the_evaluation_before_do_not_touch_the_next_one(tmp_path: Path) -> None:
    config = labelled(
        write_config(tmp_path, 0, PROMPTS, eval={"prompts": PROMPTS, "temperature": 0.0}),
        "a1.step_2",
    )
    (tmp_path / "config.toml").write_text(dump_toml(config))
    queue = start_queue(config, "--evaluate-only", "step_2")
    host, ports = config.ports.host, config.ports
    with ExitStack() as stack:
        stack.callback(queue.kill)
        # Under the very names of its own, with room for all, and with results for its leases.
        generator, verifier = (
            stack.enter_context(Dealer(f"{host}:{port}", name, label="a1.step_1"))
            for port, name in ((ports.prompts, "generator-0"), (ports.verify, "verifier-0"))
        )
        generator.send(GeneratorReady(1000, 0, 7))
        verifier.send(VerifierReady({"answers": 1000, "code": 1000, "custom": 1000}, 7))
        for number in range(LEASES):
            generator.send(RolloutDone(wrong_rollout(number)))
            verifier.send(ScoreDone(number, Score(0.0, {}, "wrong_answer")))
        for stranger in (generator, verifier):
            with pytest.raises(TurnedAway, match="does not serve this process of phase step_1"):
                stranger.receive(60)
        await_sum(tmp_path, "queue/messages_turned_away", 2 * (1 + LEASES))
        peers = ScriptedPeers(config, trains=False)
        stack.callback(peers.close)
        assert peers.run(queue) == 0, queue.stderr.read()
    # Its own answer every prompt rightly, and all of them were asked.
    assert peers.stopped == {"generator", "verifier"}
    assert sorted(i for _, lease in peers.leases for i in lease.indices) == [0] * PROMPTS
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    [row] = [row for row in rows if "eval/accuracy" in row]
    assert (row["label"], row["eval/n"], row["eval/accuracy"]) == ("step_2", PROMPTS, 1.0)
    turned_away = sum(row.get("queue/messages_turned_away", 0) for row in rows)
    assert turned_away == 2 * (1 + LEASES)
    told = queue.stderr.read()
    assert "generator-0 of phase step_1 is turned away" in told
    # The label of this start, by which its sockets know its processes.
    assert "a1" not in told
