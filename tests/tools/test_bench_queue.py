"""The queue benchmark: its arithmetic by hand, and a small run of it over real sockets."""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.protocol.frames import encode_frames
from megatron_rl.protocol.types import RolloutDone
from megatron_rl.rollout_queue.faults import RolloutLimits, find_fault
from tests.launcher.test_examples import COMMON, EXAMPLES, SLURM
from tools.bench.measuring import read_times
from tools.bench.queue import (
    DENSE,
    DENSE_PRODUCED,
    EXPERTS,
    EXPERTS_PRODUCED,
    FLOOR,
    QUEUE,
    Produced,
    Seconds,
    Variant,
    figures,
    learnt_rollouts_per_s,
    measure,
    variants,
)
from tools.bench.queue_peer import Load, Template


def test_what_512_gpus_learn_from_is_their_flops_over_those_of_a_rollout() -> None:
    length = 340 + 32_768
    pairs = length * (length + 1) / 2
    # A layer: queries and output 5120 x 4096, keys and values 5120 x 1024, MLP 3 x 5120 x 32768.
    weights = 40 * (5120 * (2 * 4096 + 2 * 1024) + 3 * 5120 * 32_768) + 5120 * 131_072
    flops = 3 * (2 * weights * length + 4 * 40 * 4096 * pairs)
    assert learnt_rollouts_per_s(DENSE, 32_768) == pytest.approx(256 * 400e12 / flops)
    assert learnt_rollouts_per_s(DENSE, 32_768) == pytest.approx(18.2, abs=0.05)
    # Eight experts of 3 x 2048 x 768, their router, 32 query heads and 2 x 4 others of 128.
    layer = 2048 * (2 * 4096 + 2 * 512) + 8 * 3 * 2048 * 768 + 128 * 2048
    weights = 48 * layer + 2048 * 151_936
    flops = 3 * (2 * weights * length + 4 * 48 * 4096 * pairs)
    assert learnt_rollouts_per_s(EXPERTS, 32_768) == pytest.approx(256 * 400e12 / flops)


class Cluster(NamedTuple):
    """The best split of tools/bench/queue.py."""

    name: str
    groups: int
    split: int
    produced: Produced


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cluster",
    [
        Cluster("magistral_24b", 512, 128, DENSE_PRODUCED),
        Cluster("qwen3_30b_a3b", 1024, 96, EXPERTS_PRODUCED),
    ],
    ids=lambda cluster: cluster.name,
)
def test_what_512_gpus_produce_is_what_the_simulator_says(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = next(example.shape for example in SLURM if example.name == cluster.name)
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **shape}))
    command = [
        "simulate", str(EXAMPLES / f"{cluster.name}.toml"), f"model.path={tmp_path}",
        f"train.prompts_per_batch={cluster.groups}", "--gpus", "512",
        "--sweep", f"split={cluster.split}", "--steps", "2", "--warm-up", "3", "--json",
    ]  # fmt: skip
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_s"] == pytest.approx(cluster.produced.tokens_per_s, rel=0.05)
    completions = cluster.groups * 16 / (1 - found["zero_variance_share"]) / found["step_s"]
    assert completions == pytest.approx(cluster.produced.completions_per_s, rel=0.05)


@pytest.mark.parametrize(
    ("name", "tokens", "choices"),
    [
        ("dense", 32_768, 0),
        ("dense_mean", 9_387, 0),
        ("replay", 32_768, 48 * 8),
        ("replay_mean", 4_185, 48 * 8),
    ],
)
def test_a_scripted_rollout_is_sound_and_as_large_as_it_is_said_to_be(
    name: str, tokens: int, choices: int
) -> None:
    load = variants(is_quick=False)[name].load
    rollout = Template(load).rollout(lease_id=1, index=0, version=3)
    assert find_fault(rollout, RolloutLimits()) == ""
    assert (rollout.oldest_version, rollout.newest_version) == (2, 3)
    sent = sum(map(len, encode_frames(RolloutDone(rollout))))
    assert load.rollout_bytes == pytest.approx(sent, rel=0.01)
    assert load.tokens == tokens
    arrays = 4 * 340 + 8 * tokens + 4 * tokens
    assert load.rollout_bytes == arrays + choices * (340 + tokens - 1)


def test_processor_time_is_counted_by_process_and_by_main_thread() -> None:
    before, began = read_times(os.getpid()), time.process_time()
    while time.process_time() - began < 0.3:
        pass
    after = read_times(os.getpid())
    # All four times are rounded to ticks of 0.01 s.
    assert 0.25 <= after.main_s - before.main_s <= after.cpu_s - before.cpu_s + 0.021
    assert after.peak_rss_mb > 10


@pytest.mark.timeout(300)
def test_queue_and_floor_serve_the_scripted_peers() -> None:
    load = Load(
        generators=30, slots=2, tokens=9000, prompts_per_batch=4, group_size=4, max_staleness=5,
        verifiers=2, leaders=2,
    )  # fmt: skip
    variant = Variant(load, needed=5.0, learnt=10.0, is_encrypted=True)
    seconds = Seconds(0.2, 1.0, 1.5)
    floor, queue = measure(FLOOR, variant, seconds), measure(QUEUE, variant, seconds)
    found = figures(variant, queue, floor)
    assert found["over_needed"] == pytest.approx(found["rollouts_per_s"] / 5.0, rel=1e-3)
    assert found["over_learnt"] == pytest.approx(found["rollouts_per_s"] / 10.0, rel=1e-3)
    assert found["tokens_per_s"] == pytest.approx(found["rollouts_per_s"] * 9000, rel=1e-3)
    assert found["bytes_per_s"] == pytest.approx(found["rollouts_per_s"] * 109_360, rel=1e-3)
    # Six batches of 16 rollouts: 4 x (340 + 2 x 9000) bytes of arrays and 4 x 9000 of text each.
    assert found["held_bound_mb"] == pytest.approx(96 * 109_360 / 1e6, rel=1e-3)
    assert 0 < found["lease_p50_ms"] <= found["lease_p99_ms"] <= found["lease_max_ms"]
    assert 0 < found["loop_ms_per_rollout"] <= found["cpu_ms_per_rollout"] * 1.1
    assert found["leases"] >= 5 and found["floor_rollouts_per_s"] > 0
