"""How long a weight sync takes, by its bytes, its rounds and the number of engines."""

from pathlib import Path

import pytest

from megatron_rl.config.tree import (
    Config,
    GeneratorConfig,
    ModelConfig,
    ParallelConfig,
    WeightsConfig,
)
from megatron_rl.plan.weight_sync import WeightSyncCost, sync_cost
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import write_model


def cost(folder: Path, replicas: int, weights: WeightsConfig, trainer_ranks: int) -> WeightSyncCost:
    write_model(folder)
    config = Config(
        model=ModelConfig(path=folder, dtype="bfloat16"),
        parallel=ParallelConfig(data=trainer_ranks),
        generator=GeneratorConfig(tensor_parallel=2, replicas=replicas),
        weights=weights,
    )
    return sync_cost(read_shape(folder), config, bytes_per_s=1e6, fixed_s=0.5)


def test_each_further_engine_takes_one_round_longer(tmp_path: Path) -> None:
    bytes_of_rank = cost(tmp_path, 1, WeightsConfig(), 8).rank_bytes
    weights = WeightsConfig(bucket_bytes=-(-bytes_of_rank // 10))
    one, five = (cost(tmp_path, replicas, weights, 8) for replicas in (1, 5))
    assert (one.lanes, one.rounds) == (five.lanes, five.rounds) == (2, 10)
    # Eight senders have more bandwidth than two receivers.
    assert one.seconds == one.one_s == five.one_s == bytes_of_rank / 1e6
    assert five.total_bytes == 5 * one.total_bytes
    assert five.seconds == pytest.approx(one.seconds * 14 / 10)
    assert five.waited_seconds(1e3) == five.whole_seconds == five.seconds + 0.5


def test_a_single_sender_is_the_limit(tmp_path: Path) -> None:
    found = cost(tmp_path, 1, WeightsConfig(), 1)
    assert found.one_s == found.total_bytes / 1e6 > found.rank_bytes / 1e6


def test_the_trainer_waits_for_what_its_next_step_does_not_hide(tmp_path: Path) -> None:
    found = cost(tmp_path, 4, WeightsConfig(overlap=True), 8)
    assert found.waited_seconds(0.3) == pytest.approx(found.seconds + 0.2)
    assert found.waited_seconds(1e3) == 0.0


def test_engines_that_read_the_same_files_or_memory_take_as_long_as_one(tmp_path: Path) -> None:
    for method in ("folder", "ipc"):
        found = cost(tmp_path, 5, WeightsConfig(method=method), 8)
        assert found.seconds == found.one_s


def test_groups_of_engines_follow_each_other(tmp_path: Path) -> None:
    bytes_of_rank = cost(tmp_path, 1, WeightsConfig(), 8).rank_bytes
    size = -(-bytes_of_rank // 10)
    # Two rows, of three engines and of two.
    found = cost(tmp_path, 5, WeightsConfig(bucket_bytes=size, groups=2), 8)
    assert found.seconds == pytest.approx(found.one_s * (12 + 11) / 10)
    apart = cost(tmp_path, 5, WeightsConfig(method="folder", groups=9), 8)
    assert apart.seconds == pytest.approx(5 * apart.one_s)
