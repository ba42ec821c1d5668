"""Expert-parallel sizes that cannot be are refused, with the nearest that can."""

import pytest

from megatron_rl.protocol.config import ParallelConfig
from megatron_rl.protocol.parallel import check_expert_ranks, nearest_divisor
from megatron_rl.protocol.process import InputError


@pytest.mark.parametrize(
    ("count", "wanted", "nearest"), [(12, 5, 4), (12, 9, 6), (7, 3, 1), (8, 8, 8), (6, 100, 6)]
)
def test_nearest_divisor(count: int, wanted: int, nearest: int) -> None:
    assert nearest_divisor(count, wanted) == nearest


@pytest.mark.parametrize(
    ("parallel", "experts", "message"),
    [
        (ParallelConfig(expert=2), 0, "expert = 2, but the model has no experts: use 1"),
        (ParallelConfig(data=4, expert=3), 8, "8 experts and .* = 4; nearest possible: 2"),
        (ParallelConfig(data=2, expert=4), 8, "x parallel.data = 2; nearest possible: 2"),
        (ParallelConfig(data=8, expert=8), 12, "12 experts and .* = 8; nearest possible: 4"),
        (ParallelConfig(tensor=2), 8, "needs parallel.sequence = true"),
    ],
)
def test_impossible_sizes_are_input_errors(
    parallel: ParallelConfig, experts: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_expert_ranks(parallel, experts)


@pytest.mark.parametrize(
    ("parallel", "experts"),
    [
        (ParallelConfig(data=8, tensor=2), 0),
        (ParallelConfig(data=8), 6),
        (ParallelConfig(tensor=2, sequence=True, data=2, expert=4), 8),
        (ParallelConfig(pipeline=2, data=2, expert=2), 2),
    ],
)
def test_possible_sizes_pass(parallel: ParallelConfig, experts: int) -> None:
    check_expert_ranks(parallel, experts)
