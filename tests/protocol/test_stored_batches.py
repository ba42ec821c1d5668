"""Stored batches: read as they were written, dealt again as the queue would have dealt them."""

from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, read_queue_state
from megatron_rl.protocol.frames import decode, encode, split_frames
from megatron_rl.protocol.queue_state import PromptCursor, QueueState
from megatron_rl.protocol.sequence_cost import TOKENS
from megatron_rl.protocol.stored_batches import (
    BATCHES,
    deal_again,
    read_batch,
    read_share,
    remove_batches,
    state_name,
    stored_steps,
    write_batch,
    write_state,
)
from megatron_rl.protocol.types import MinibatchShare, RankBatch, TrainSequence
from megatron_rl.rollout_queue.batch_thread import store_batch
from megatron_rl.rollout_queue.batches import deal_batch
from tests.rollout_queue.test_batch_thread import as_bytes, order_of


def test_each_rank_reads_the_frames_that_the_queue_would_have_sent(tmp_path: Path) -> None:
    shares = deal_batch(order_of(6, 5, 3))
    write_batch(tmp_path, shares)
    read = read_batch(tmp_path, 3)
    # The metrics are numbers of any kind before, and floats after.
    assert [share.metrics for share in read] == [share.metrics for share in shares]
    assert as_bytes(read) == as_bytes([decode(encode(share), RankBatch) for share in shares])
    for rank, share in enumerate(shares):
        size, joined = read_share(tmp_path, 3, rank)
        assert size == 4
        assert [bytes(frame) for frame in split_frames(joined)] == as_bytes([share])[0]
    assert read_share(tmp_path, 3, 4) == (4, bytearray())


@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_another_number_of_ranks_gets_the_batch_that_the_queue_would_have_dealt(
    dp_size: int,
) -> None:
    expected = deal_batch(order_of(6, 5, 3, dp_size=dp_size))
    found = deal_again(
        deal_batch(order_of(6, 5, 3)), dp_size, budget_tokens=32_768, cost=TOKENS
    )  # fmt: skip
    assert as_bytes(found) == as_bytes(expected)


def test_members_are_dealt_again_in_the_order_of_their_group() -> None:
    def share(rank: int, *members: int) -> RankBatch:
        tokens, logprobs = np.zeros(4, np.int32), np.zeros(3, np.float32)
        sequences = [
            TrainSequence(tokens, 1, logprobs, [(0, 3)], 0.0, 1.0, member=member)
            for member in members
        ]
        return RankBatch(0, rank, [MinibatchShare([sequences], groups=1, members=4)], {})

    shares = [share(0, 0, 2), share(1, 1, 3)]
    [found] = deal_again(shares, 1, budget_tokens=32_768, cost=TOKENS)
    [microbatch] = found.minibatches[0].microbatches
    assert [sequence.member for sequence in microbatch] == [0, 1, 2, 3]


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    write_batch(tmp_path, deal_batch(order_of(2, 2)))
    path = tmp_path / "000000.batch"
    content = path.read_bytes()
    flipped = content[:-200] + bytes([content[-200] ^ 1]) + content[-199:]
    for damaged in (b"", content[:4], content[:30], content[:-1], flipped):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="000000.batch is damaged"):
            read_batch(tmp_path, 0)
    path.unlink()
    with pytest.raises(InputError, match="000000.batch cannot be read"):
        read_batch(tmp_path, 0)


def test_batches_stay_as_long_as_a_kept_checkpoint_needs_them(tmp_path: Path) -> None:
    folder = tmp_path / BATCHES

    def kept_after(step: int) -> list[int]:
        store_batch(tmp_path, deal_batch(order_of(2, 2, step)), keep_last=2, limit_s=1.0)
        return stored_steps(folder)

    assert kept_after(0) == [0]
    # The only checkpoint is being written: the trainer may have to begin at the start.
    (tmp_path / CHECKPOINTS / "step_000001.partial").mkdir(parents=True)
    assert kept_after(1) == [0, 1]
    for name in ("step_000001", "step_000002", "step_000003.partial"):
        (tmp_path / CHECKPOINTS / name).mkdir()
    assert kept_after(3) == [1, 3]
    for step in (1, 3, 4, 5):
        write_state(folder, QueueState(step, PromptCursor(0, [], [], 0), 0, [], []))
    (tmp_path / CHECKPOINTS / "step_000004").mkdir()
    assert kept_after(4) == [3, 4]
    remove_batches(folder, since=4)
    assert stored_steps(folder) == [3]
    # A state after 4 batches is that of the checkpoint at which the batches were cut.
    assert sorted(path.name for path in folder.glob("*.json")) == [state_name(3), state_name(4)]
    assert read_queue_state(folder, state_name(4)).step == 4
