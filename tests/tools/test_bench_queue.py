"""The queue benchmark: its arithmetic by hand, and a small run of it over real sockets."""

import os
import time

import pytest

from megatron_rl.protocol.frames import encode_frames
from megatron_rl.protocol.types import RolloutDone
from megatron_rl.rollout_queue.groups import find_fault
from tools.bench.queue import FLOOR, QUEUE, Seconds, Variant, figures, measure, variants
from tools.bench.queue_load import DENSE, EXPERTS, Load, Template, needed_rollouts_per_s
from tools.bench.queue_process import read_times


def test_what_512_gpus_need_is_their_flops_over_those_of_a_rollout() -> None:
    length = 340 + 32_768
    pairs = length * (length + 1) / 2
    # A layer: queries and output 5120 x 4096, keys and values 5120 x 1024, MLP 3 x 5120 x 32768.
    weights = 40 * (5120 * (2 * 4096 + 2 * 1024) + 3 * 5120 * 32_768) + 5120 * 131_072
    flops = 3 * (2 * weights * length + 4 * 40 * 4096 * pairs)
    assert needed_rollouts_per_s(DENSE, 32_768) == pytest.approx(256 * 400e12 / flops)
    assert needed_rollouts_per_s(DENSE, 32_768) == pytest.approx(18.2, abs=0.05)
    # Eight experts of 3 x 2048 x 768, their router, 32 query heads and 2 x 4 others of 128.
    layer = 2048 * (2 * 4096 + 2 * 512) + 8 * 3 * 2048 * 768 + 128 * 2048
    weights = 48 * layer + 2048 * 151_936
    flops = 3 * (2 * weights * length + 4 * 48 * 4096 * pairs)
    assert needed_rollouts_per_s(EXPERTS, 32_768) == pytest.approx(256 * 400e12 / flops)


@pytest.mark.parametrize("name", ["dense", "replay"])
def test_a_scripted_rollout_is_sound_and_as_large_as_it_is_said_to_be(name: str) -> None:
    load = variants(is_quick=False)[name].load
    rollout = Template(load).rollout(lease_id=1, index=0, version=3)
    assert find_fault(rollout) == ""
    assert (rollout.oldest_version, rollout.newest_version) == (2, 3)
    sent = sum(map(len, encode_frames(RolloutDone(rollout))))
    assert load.rollout_bytes == pytest.approx(sent, rel=0.01)
    arrays = 4 * 340 + 8 * 32_768 + 4 * 32_768
    choices = 48 * 8 * (340 + 32_767)
    assert load.rollout_bytes == arrays + (choices if name == "replay" else 0)


def test_processor_time_is_counted_by_process_and_by_main_thread() -> None:
    before, began = read_times(os.getpid()), time.process_time()
    while time.process_time() - began < 0.3:
        pass
    after = read_times(os.getpid())
    assert 0.25 <= after.main_s - before.main_s <= after.cpu_s - before.cpu_s + 0.011
    assert 10 < after.rss_mb <= after.peak_rss_mb


@pytest.mark.timeout(120)
def test_queue_and_floor_serve_the_scripted_peers() -> None:
    load = Load(
        generators=30, slots=2, tokens=9000, groups_per_batch=4, group_size=4, max_staleness=5,
        verifiers=2, leaders=2,
    )  # fmt: skip
    variant = Variant(load, needed=5.0, is_encrypted=True)
    seconds = Seconds(0.2, 1.0, 1.5)
    floor, queue = measure(FLOOR, variant, seconds), measure(QUEUE, variant, seconds)
    found = figures(variant, queue, floor)
    assert found["over_needed"] == pytest.approx(found["rollouts_per_s"] / 5.0, rel=1e-3)
    assert found["bytes_per_s"] == pytest.approx(found["rollouts_per_s"] * 109_360, rel=1e-3)
    # Six batches of 16 rollouts: 4 x (340 + 2 x 9000) bytes of arrays and 4 x 9000 of text each.
    assert found["held_bound_mb"] == pytest.approx(96 * 109_360 / 1e6, rel=1e-3)
    assert 0 < found["lease_p50_ms"] <= found["lease_p99_ms"] <= found["lease_max_ms"]
    assert 0 < found["loop_ms_per_rollout"] <= found["cpu_ms_per_rollout"] * 1.1
    assert found["leases"] >= 5 and found["floor_rollouts_per_s"] > 0
