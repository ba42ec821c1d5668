"""Runs of elements are cut into boxes that hold each element once, in their order."""

import itertools
from math import prod

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from megatron_rl.trainer.checkpoint.optimizer_state import boxes_of, runs_as_boxes

ROWS, COLUMNS = 6, 5


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (5, 1), (1, 5), (2, 3, 4), (2, 1, 3)])
def test_boxes_hold_the_elements_of_a_run_in_their_order(shape: tuple[int, ...]) -> None:
    count = prod(shape)
    numbers = torch.arange(count).view(shape)
    for start, end in itertools.combinations(range(count + 1), 2):
        boxes = list(runs_as_boxes(shape, start, end))
        found = [
            numbers[tuple(slice(c, c + s) for c, s in zip(corner, size, strict=True))].flatten()
            for corner, size in boxes
        ]
        assert torch.cat(found).tolist() == list(range(start, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert list(runs_as_boxes(shape, 2, 2)) == []


def owner(shape: tuple[int, ...], *offsets: tuple[int, int, int], lead: int = 0) -> ShardedTensor:
    data = torch.empty(shape)
    return ShardedTensor.from_rank_offsets(
        "weight", data, *offsets, replica_id=(0, 1, 2), prepend_axis_num=lead
    )


def placed(kept: ShardedTensor | ShardedTensorFactory, cuts: list[int]) -> torch.Tensor:
    """The whole tensor, NaN where no box is, from runs between the cuts."""
    run = torch.arange(ROWS * COLUMNS, dtype=torch.float32)
    whole = None
    for start, end in itertools.pairwise(cuts):
        for box in boxes_of(kept, torch.Size((ROWS, COLUMNS)), start, end):
            shard = box.sharded("key", run[start:end], start)
            assert (shard.key, shard.replica_id) == ("key", (0, 1, 0))
            if whole is None:
                whole = torch.full(shard.global_shape, torch.nan)
            place = whole[shard.global_slice()]
            assert place.isnan().all()
            place.copy_(shard.data)
            assert shard.data.untyped_storage().data_ptr() == run.untyped_storage().data_ptr()
    assert whole is not None
    return whole


CUTS = [[0, 30], [0, 7, 8, 19, 30], [0, 5, 15, 15, 30], list(range(31))]


@pytest.mark.parametrize("cuts", CUTS)
def test_boxes_lie_where_the_shard_lies_in_the_whole(cuts: list[int]) -> None:
    numbers = torch.arange(30, dtype=torch.float32).view(ROWS, COLUMNS)
    # The second of three parts by rows.
    whole = placed(owner((ROWS, COLUMNS), (0, 1, 3)), cuts)
    assert whole.shape == (18, COLUMNS) and torch.equal(whole[6:12], numbers)
    assert whole[:6].isnan().all() and whole[12:].isnan().all()
    # Expert 2 of 4, the first of two parts by columns.
    whole = placed(owner((ROWS, COLUMNS), (0, 2, 4), (2, 0, 2), lead=1), cuts)
    assert whole.shape == (4, ROWS, 10) and torch.equal(whole[2, :, :5], numbers)
    assert int(whole.isnan().sum()) == 4 * 60 - 30


@pytest.mark.parametrize("cuts", CUTS)
def test_gate_and_up_lie_apart_in_the_whole(cuts: list[int]) -> None:
    numbers = torch.arange(30, dtype=torch.float32).view(ROWS, COLUMNS)
    # The second of two tensor ranks: its gate follows the first's gate, its up the first's up.
    whole = placed(apply_swiglu_sharded_factory(owner((ROWS, COLUMNS), (0, 1, 2)), ()), cuts)
    assert whole.shape == (12, COLUMNS)
    assert torch.equal(whole[3:6], numbers[:3]) and torch.equal(whole[9:12], numbers[3:])
    assert whole[:3].isnan().all() and whole[6:9].isnan().all()
