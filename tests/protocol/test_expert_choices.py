"""Experts' numbers travel in one, two or four bytes, as they need, and come back exactly."""

import msgspec
import numpy as np
import pytest

from megatron_rl.protocol.rollout import narrow_choices
from megatron_rl.protocol.types import Rollout, RolloutDone
from megatron_rl.protocol.wire import decode, encode


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([], np.uint8),
        ([0, 127], np.uint8),
        ([255, 0], np.uint8),
        ([256, 0], np.int16),
        ([-1, 127], np.int16),
        ([32_767, 0], np.int16),
        ([32_768, 5], np.int32),
        ([-1, 70_000], np.int32),
    ],
)
def test_choices_arrive_as_they_were(numbers: list[int], dtype: type) -> None:
    choices = np.array(numbers, np.int32)
    empty = np.zeros(0, np.float32)
    rollout = Rollout(
        3, 1, np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32), empty, [], "stop", "x",
        expert_choices=narrow_choices(choices),
    )  # fmt: skip
    found = decode(encode(RolloutDone(rollout))).rollout.expert_choices
    assert found.dtype == dtype and found.tolist() == numbers


def test_a_choice_takes_one_byte_on_the_wire() -> None:
    empty = np.zeros(0, np.float32)
    ids = np.arange(2, dtype=np.int32)
    bare = Rollout(3, 1, ids, ids, empty, [], "stop", "x")
    choices = narrow_choices(np.arange(100_000, dtype=np.int32) % 128)
    full = msgspec.structs.replace(bare, expert_choices=choices)
    # The length of the bytes takes some bytes more than that of none.
    assert len(encode(RolloutDone(full))) - len(encode(RolloutDone(bare))) <= 100_000 + 4


def test_a_part_of_an_array_is_sent_as_its_values() -> None:
    every_other = np.arange(10, dtype=np.int16)[::2]
    empty = np.zeros(0, np.float32)
    rollout = Rollout(3, 1, every_other.astype(np.int64), every_other, empty, [], "stop", "x")
    found = decode(encode(RolloutDone(rollout))).rollout
    assert found.token_ids.tolist() == found.prompt_ids.tolist() == [0, 2, 4, 6, 8]
