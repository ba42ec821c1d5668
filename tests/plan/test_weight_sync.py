"""How long a weight sync takes, by its bytes and by who serves whom."""

from pathlib import Path

import pytest

from megatron_rl.config.tree import GeneratorConfig, WeightsConfig
from megatron_rl.plan.weight_sync import sync_cost
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import write_model


def test_each_copy_serves_its_share_of_the_replicas_in_turn(tmp_path: Path) -> None:
    write_model(tmp_path)
    shape = read_shape(tmp_path)
    copies = [tuple(range(first, first + 4)) for first in (0, 4)]
    one, two, five = (
        sync_cost(shape, GeneratorConfig(tensor_parallel=2, replicas=replicas), WeightsConfig(),
                     copies=copies, item_bytes=2, bytes_per_s=1e6, turn_s=0.5)
        for replicas in (1, 2, 5)
    )  # fmt: skip
    assert (one.copies, one.group_ranks) == (2, 4 + 2)
    assert one.seconds == one.least_seconds == one.rank_bytes / 1e6
    assert (two.total_bytes, two.turns, two.seconds) == (2 * one.total_bytes, 1, one.seconds)
    assert (five.total_bytes, five.turns) == (5 * one.total_bytes, 3)
    assert five.seconds == pytest.approx(3 * one.seconds)
    assert five.whole_seconds == pytest.approx(3 * one.seconds + 1.5)
    assert five.waited_seconds(1e3) == five.whole_seconds
    # Four senders have half of what two receivers take: two engines fill their bandwidth.
    assert five.least_seconds == pytest.approx(3 * one.total_bytes / 4 / 1e6)


def test_by_way_of_host_memory_a_copy_serves_all_its_replicas_at_once(tmp_path: Path) -> None:
    write_model(tmp_path)
    shape = read_shape(tmp_path)
    copies = [tuple(range(first, first + 4)) for first in (0, 4)]
    by_host = WeightsConfig(method="host", overlap=True)
    one, four, ten = (
        sync_cost(shape, GeneratorConfig(tensor_parallel=2, replicas=replicas), by_host,
                     copies=copies, item_bytes=2, bytes_per_s=1e6, turn_s=0.5)
        for replicas in (1, 4, 10)
    )  # fmt: skip
    # Up to two engines a copy the receivers are the limit, with five it is their senders.
    assert one.seconds == four.seconds == one.rank_bytes / 1e6
    assert ten.seconds == ten.least_seconds == pytest.approx(5 * one.total_bytes / 4 / 1e6)
    assert ten.turns == 1 and ten.whole_seconds == pytest.approx(ten.seconds + 0.5)
    # The trainer waits for what its next step does not hide.
    assert ten.waited_seconds(0.3) == pytest.approx(ten.seconds + 0.2)
    assert ten.waited_seconds(1e3) == 0.0
