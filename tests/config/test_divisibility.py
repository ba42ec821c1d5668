"""Parallel sizes that cannot be are refused, with the nearest that can."""

from dataclasses import replace

import pytest

from megatron_rl.config.divisibility import Counts, check_sizes, nearest_divisor
from megatron_rl.config.errors import InputError
from megatron_rl.config.parallel import stage_layers
from megatron_rl.config.tree import ParallelConfig

DENSE = Counts(heads=8, kv_heads=4, layers=12, ffn=24)
MIXED = replace(DENSE, ffn=0, experts=8, expert_ffn=12)


@pytest.mark.parametrize(
    ("count", "wanted", "nearest"), [(12, 5, 4), (12, 9, 6), (7, 3, 1), (8, 8, 8), (6, 100, 6)]
)
def test_nearest_divisor(count: int, wanted: int, nearest: int) -> None:
    assert nearest_divisor(count, wanted) == nearest


@pytest.mark.parametrize(
    ("parallel", "counts", "message"),
    [
        (ParallelConfig(tensor=3), DENSE, "8 attention heads and 4 key-value .* possible: 2"),
        (ParallelConfig(tensor=8), DENSE, "tensor = 8 does not divide .*; nearest possible: 4"),
        (ParallelConfig(tensor=4), replace(DENSE, ffn=6), "6 MLP units; nearest possible: 2"),
        (ParallelConfig(pipeline=5), DENSE, "pipeline = 5 .* 12 layers; nearest possible: 4"),
        (
            ParallelConfig(pipeline=2, virtual_stages=4),
            DENSE,
            "virtual_stages = 4 does not divide the 6 layers of each .* nearest possible: 3",
        ),
        (
            ParallelConfig(pipeline=3, first_stage_layers=3),
            DENSE,
            "first_stage_layers = 3 .* leave 9 of the model's 12 layers to the other stages",
        ),
        (ParallelConfig(pipeline=2, last_stage_layers=12), DENSE, "leave 0 of the model's 12"),
        (
            ParallelConfig(pipeline=2, first_stage_layers=4, last_stage_layers=4),
            DENSE,
            "leave 4 of the model's 12 layers to the other stages",
        ),
        (ParallelConfig(expert=2), DENSE, "expert = 2, but the model has no experts: use 1"),
        (ParallelConfig(expert_tensor=2), DENSE, "expert_tensor = 2, but the model has no experts"),
        (ParallelConfig(data=4, expert=3), MIXED, "8 experts and .* = 4; nearest possible: 2"),
        (ParallelConfig(context=2, expert=4), MIXED, "context x data .* = 2; nearest possible: 2"),
        (
            ParallelConfig(data=8, expert=8),
            replace(MIXED, experts=12),
            "12 experts and .* = 8; nearest possible: 4",
        ),
        (ParallelConfig(data=8, expert_tensor=8), MIXED, "12 units .* nearest possible: 4"),
        (ParallelConfig(data=4, expert_tensor=2, expert=4), MIXED, "= 2; nearest possible: 2"),
        (ParallelConfig(tensor=2), MIXED, "needs parallel.sequence = true"),
    ],
)
def test_impossible_sizes_are_input_errors(
    parallel: ParallelConfig, counts: Counts, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_sizes(parallel, counts)


@pytest.mark.parametrize(
    ("parallel", "counts"),
    [
        (ParallelConfig(data=8, tensor=2, context=2), DENSE),
        (ParallelConfig(pipeline=2, virtual_stages=3), DENSE),
        (ParallelConfig(pipeline=5, first_stage_layers=1, last_stage_layers=2), DENSE),
        (ParallelConfig(data=8), MIXED),
        (ParallelConfig(tensor=2, sequence=True, data=2, expert=4), MIXED),
        (ParallelConfig(pipeline=2, data=2, expert=2), replace(MIXED, experts=2)),
        (ParallelConfig(context=2, data=2, expert=2, expert_tensor=2), MIXED),
    ],
)
def test_possible_sizes_pass(parallel: ParallelConfig, counts: Counts) -> None:
    check_sizes(parallel, counts)


def test_stages_of_uneven_sizes_are_those_that_were_asked_for() -> None:
    assert stage_layers(12, 5, 1, 2) == (1, 3, 3, 3, 2)
    assert stage_layers(12, 2, last=5) == (7, 5)
    assert stage_layers(12, 2, 4, 8) == (4, 8)
    assert stage_layers(12, 3) == (4, 4, 4)
    with pytest.raises(ValueError, match="need parallel.pipeline above 1 and virtual_stages=1"):
        ParallelConfig(pipeline=2, virtual_stages=2, first_stage_layers=1)


def test_world_size_is_the_product_of_the_sizes() -> None:
    assert ParallelConfig(tensor=2, pipeline=3, context=5, data=7).world_size == 210
