"""The queue as a process, over real sockets, with peers that follow a script."""

import collections
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import zmq

from megatron_rl.data.dropped_prompts import DroppedPrompt, write_dropped
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import GeneratorReady, NextBatch, VerifierReady, WeightsSynced
from megatron_rl.protocol.wire import encode_frames, labelled
from tests.rollout_queue.scripted_peers import ScriptedPeers, await_sum, start_queue, write_config

TRAIN = {
    "steps": 6, "prompts_per_batch": 4, "group_size": 4, "minibatches": 2, "microbatch_tokens": 64,
}  # fmt: skip


def reduced(batch: list, name: str) -> float:
    value, count, reduce = batch[0].metrics[name]
    return value / count if reduce == "mean" else value


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_whole_run_trains_evaluates_records_and_stops(tmp_path: Path, max_staleness: int) -> None:
    has_ledger = max_staleness == 0
    config = write_config(
        tmp_path, 40, 10, train=TRAIN,
        queue={"max_staleness": max_staleness, "strict_staleness": True, "ledger": has_ledger},
        eval={"prompts": 8, "samples": 2, "temperature": 0.0, "every_steps": 4},
        generator={"max_running": 64},
    )  # fmt: skip
    dropped = {"prompts:3", "prompts:17", "prompts:41", "prompts:50"}
    write_dropped(tmp_path, [DroppedPrompt(name, "", "too long") for name in dropped])
    queue = start_queue(config)
    peers = ScriptedPeers(config, dp_size=2, hold=9)
    peers.play(queue)
    assert peers.stopped == {"generator", "verifier", "trainer-0", "trainer-1"}
    assert len(peers.batches) == 6
    leased = {lease.prompt.id for _, lease in peers.leases}
    # All 36 train prompts that are left would do for 9 batches; 8 held-out ones are left.
    assert not leased & dropped and {f"prompts:{n}" for n in range(42, 50)} <= leased
    check_batches(peers, max_staleness)
    assert (tmp_path / "ledger").exists() == has_ledger
    spanning = sum(reduced(batch, "queue/rollouts_spanning_versions") for batch in peers.batches)
    assert (spanning > 0) == (max_staleness > 0)
    check_files(tmp_path, peers)


def check_batches(peers: ScriptedPeers, max_staleness: int) -> None:
    for step, batch in enumerate(peers.batches):
        sequences = [
            [s for m in minibatch.microbatches for s in m]
            for minibatch in (batch[0].minibatches[n] for n in (0, 1))
        ]
        others = [
            [s for m in minibatch.microbatches for s in m]
            for minibatch in (batch[1].minibatches[n] for n in (0, 1))
        ]
        for one, two in zip(sequences, others, strict=True):
            assert len(one) + len(two) == 8
            weight = sum(s.weight * (len(s.token_ids) - s.prompt_length) for s in one + two)
            assert weight == pytest.approx(1.0)
            assert sum(s.advantage for s in one + two) == pytest.approx(0.0, abs=1e-9)
        oldest = min(s.token_versions.min() for part in sequences + others for s in part)
        assert 0 <= step - oldest <= max_staleness
        assert reduced(batch, "queue/staleness_versions_max") == step - oldest
        assert reduced(batch, "queue/rollouts_trained") == 16


def check_files(folder: Path, peers: ScriptedPeers) -> None:
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "eval/accuracy" in row]
    labels = [(row["label"], row["step"]) for row in rows]
    assert labels == [("before", 0), ("step_4", 4), ("after", 6)]
    for row in rows:
        assert row["eval/accuracy"] == 1.0 and row["eval/accuracy_se"] == 0.0 and row["eval/n"] == 8
    records = read_jsonl(folder / "rollouts" / "eval_after.jsonl")
    assert len(records) == 16 and all(record["versions"] == [6] for record in records)
    trained: collections.Counter = collections.Counter()
    for step in range(6):
        records = read_jsonl(folder / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(records) == 16
        trained.update((record["group"], record["index"]) for record in records)
        assert set(records[0]) == {
            "prompt_id", "group", "index", "text", "answer", "reward", "parts", "reason", "tokens",
            "versions", "finish_reason", "task", "problem", "language", "seed", "prompt_tail",
            "generator", "prompt_tokens", "spans", "times", "words",
        }  # fmt: skip
    assert max(trained.values()) == 1 and len(trained) == 96
    # Nothing was generated in vain: each training group is trained on or flat.
    opened = {lease.sampling.seed for _, lease in peers.leases if lease.sampling.temperature > 0}
    flat = sum(reduced(batch, "queue/groups_dropped_zero_variance") for batch in peers.batches)
    assert len(opened) >= 24 + flat
    greedy = [lease for _, lease in peers.leases if lease.sampling.temperature == 0]
    assert {lease.prompt.split for lease in greedy} == {"held_out"}
    assert min(version for version, _ in peers.leases) >= 0


def test_batches_come_while_a_version_is_synced_but_for_those_after_an_evaluation(
    tmp_path: Path,
) -> None:
    config = write_config(
        tmp_path, 40, 10, train=TRAIN, queue={"max_staleness": 2, "strict_staleness": True},
        eval={"prompts": 8, "every_steps": 3}, generator={"max_running": 64},
    )  # fmt: skip
    queue = start_queue(config)
    peers = ScriptedPeers(config, dp_size=2, sync_s=0.5)
    peers.play(queue)
    assert peers.early_steps == [1, 2, 4, 5]
    check_batches(peers, 2)


def test_evaluate_only_evaluates_once_and_stops(tmp_path: Path) -> None:
    config = write_config(tmp_path, 0, 5, eval={"prompts": 5, "temperature": 0.0}, train=TRAIN)
    queue = start_queue(config, "--evaluate-only", "sft_baseline", "eval.samples=3")
    peers = ScriptedPeers(config, trains=False)
    peers.play(queue)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert sum(row.get("activity/rollouts_for_evaluation", 0) for row in rows) == 15
    [row] = [row for row in rows if "eval/accuracy" in row]
    assert (row["label"], row["eval/n"]) == ("sft_baseline", 5)
    assert len(read_jsonl(tmp_path / "rollouts" / "eval_sft_baseline.jsonl")) == 15
    assert peers.stopped == {"generator", "verifier"}


def test_queue_that_waits_in_vain_exits_1_and_says_what_is_open(tmp_path: Path) -> None:
    train = TRAIN | {"batch_timeout_s": 1.5}
    config = write_config(tmp_path, 10, 0, train=train, eval={"prompts": 0})
    queue = start_queue(config)
    peers = ScriptedPeers(config)
    try:
        peers.trainers[0].send(WeightsSynced(0))
        peers.generator.send(GeneratorReady(64, 0, session=1))
        assert queue.wait(timeout=60) == 1
    finally:
        queue.kill()
        peers.close()
    message = queue.stderr.read()
    assert "nothing moved for" in message
    assert "12 groups open, 0 complete of 4" in message
    assert "48 completions in 12 leases" in message and "generator-0 (48/64 busy" in message
    assert "no verifier" in message and "Traceback" not in message


def test_port_in_use_and_too_few_held_out_prompts_exit_2(tmp_path: Path) -> None:
    config = write_config(tmp_path, 10, 2, train=TRAIN, eval={"prompts": 0})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", config.ports.verify))
        taken.listen()
        queue = start_queue(config)
        _, errors = queue.communicate(timeout=60)
    assert queue.returncode == 2 and f"cannot listen on 127.0.0.1:{config.ports.verify}" in errors
    queue = start_queue(config, "eval.prompts=3")
    _, errors = queue.communicate(timeout=60)
    assert queue.returncode == 2 and "only 2 held-out prompts" in errors


def test_records_that_cannot_be_written_end_the_queue_with_exit_code_1_and_the_cause(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, 40, 0, train=TRAIN, eval={"prompts": 0})
    # A folder in the place of a file.
    (tmp_path / "rollouts" / "step_000001.jsonl" / "x").mkdir(parents=True)
    queue = start_queue(config)
    peers = ScriptedPeers(config)
    message = peers.play(queue, exit_code=1)
    assert "step_000001.jsonl could not be written: Is a directory" in message
    assert "Traceback" not in message
    assert len(read_jsonl(tmp_path / "rollouts" / "step_000000.jsonl")) == 16


def test_sigterm_ends_the_queue_at_once(tmp_path: Path) -> None:
    config = write_config(tmp_path, 10, 0, train=TRAIN, eval={"prompts": 0})
    queue = start_queue(config)
    log = tmp_path / "logs" / "queue.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "endpoint is on" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = time.monotonic()
    queue.send_signal(signal.SIGTERM)
    queue.communicate(timeout=60)
    assert queue.returncode == 128 + signal.SIGTERM and time.monotonic() - started < 20


def test_queue_spends_little_cpu_on_a_batch_of_256_rollouts(tmp_path: Path) -> None:
    train = {"steps": 24, "prompts_per_batch": 16, "group_size": 16, "microbatch_tokens": 1024}
    config = write_config(
        tmp_path, 200, 0, train=train, eval={"prompts": 0}, generator={"max_running": 256}
    )
    queue = start_queue(config)
    used: dict[int, float] = {}
    peers = ScriptedPeers(config, on_step=lambda step: used.update({step: cpu_seconds(queue.pid)}))
    peers.play(queue)
    per_batch = (used[22] - used[2]) / 20
    print(json.dumps({"queue_cpu_s_per_256_rollouts": round(per_batch, 4)}))
    # 0.03 s on one of two cores that others shared.
    assert per_batch < 0.3


def cpu_seconds(pid: int) -> float:
    """User and system time of a running process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_cannot_be_read_costs_its_peer_and_ends_nothing(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, 40, 0, train=TRAIN, queue={"max_staleness": 1}, eval={"prompts": 0},
        generator={"max_running": 64},
    )  # fmt: skip
    queue = start_queue(config)
    peers = ScriptedPeers(config)
    context = zmq.Context()
    try:
        for port in (config.ports.prompts, config.ports.verify, config.ports.batches):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.IDENTITY, labelled("stranger", config.ports.label))
            stranger.connect(f"tcp://{config.ports.host}:{port}")
            stranger.send(b"\x00")
            stranger.send_multipart([b"", b"", b"x"])
            # A known kind at the wrong place, and a worker pool that there is not.
            if port != config.ports.batches:
                stranger.send_multipart(encode_frames(NextBatch(0, 0, 1)))
                stranger.send_multipart(encode_frames(VerifierReady({"x": 1}, 1)))
        await_sum(tmp_path, "queue/messages_refused", 3 * 2 + 2 * 2)
        assert peers.run(queue) == 0, queue.stderr.read()
    finally:
        context.destroy(linger=0)
        queue.kill()
        peers.close()
    assert len(peers.batches) == TRAIN["steps"]
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert sum(row.get("queue/messages_refused", 0) for row in rows) == 3 * 2 + 2 * 2
    assert "is refused" in queue.stderr.read()
