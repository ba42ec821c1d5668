"""One leader per model-parallel group fetches the batch; every rank of the group gets it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.protocol import wire
from megatron_rl.protocol.types import (
    MinibatchShare,
    NextBatch,
    RankBatch,
    Stop,
    TrainSequence,
)
from megatron_rl.protocol.wire import Router
from megatron_rl.trainer import batch_client
from megatron_rl.trainer.batch_client import BatchClient
from megatron_rl.trainer.leader import Leader
from megatron_rl.weights.sync.control import PIECE_BYTES, Control, broadcast
from tests.distributed import run_ranks
from tests.ports import free_port


def make_batch(step: int, dp_rank: int) -> RankBatch:
    sequence = TrainSequence(
        np.arange(5, dtype=np.int32), 2, np.ones(3, np.float32), [(0, 3)], 0.5, 0.1
    )
    return RankBatch(step, dp_rank, [MinibatchShare([[sequence], []])], {"x": (1.0, 2.0, "mean")})


def serve_or_fetch(port: int) -> list:
    """Rank 0 of three plays the queue; ranks 1 and 2 are one model-parallel group."""
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return serve(port)
    batch_client.TURN_S = 0.2
    decoded = count_calls("decode_frames")
    encoded = count_calls("encode_frames")
    with BatchClient(
        f"127.0.0.1:{port}",
        dp_rank=3,
        dp_size=4,
        leader=Leader(group, Control(group)),
        timeout_s=60,
    ) as batches:
        batches.announce(0, is_final=False)
        turns: list[int] = []
        first = batches.next(0, lambda: turns.append(dist.get_rank(group)))
        assert first is not None
        sequence = first.minibatches[0].microbatches[0][0]
        facts = [first.step, first.dp_rank, sequence.token_ids.tolist(), sequence.advantage]
        # The ranks waited together: what they do meanwhile may be collective.
        assert 2 <= len(turns) < 20
        facts += [first.metrics, batches.next(1)]
    # Two answers, at which the leader looks first; it also encoded the requests for them.
    assert len(decoded) == (4 if group.rank() == 0 else 2)
    assert len(encoded) == (2 if group.rank() == 0 else 0)
    return facts


def count_calls(name: str) -> list[str]:
    """Has a function of `wire` add to the list whenever it is called."""
    calls: list[str] = []
    real = getattr(wire, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    setattr(wire, name, counted)
    return calls


def serve(port: int) -> list:
    """Answer the first request late, the second with Stop; returns what was heard."""
    heard = []
    with Router("127.0.0.1", port) as router:
        while len(heard) < 2:
            received = router.receive(60)
            assert received is not None
            peer, message = received
            heard.append((peer, message))
            assert isinstance(message, NextBatch), message
            if message.step == 0:
                # Longer than several turns of the leader's wait.
                assert router.receive(0.7) is None
                router.send(peer, make_batch(0, message.dp_rank))
            else:
                router.send(peer, Stop())
    return heard


def test_every_rank_gets_the_leaders_batch_and_the_stop() -> None:
    heard, *fetched = run_ranks(serve_or_fetch, 3, free_port())
    # Only data-parallel rank 0 announces versions, so rank 3's leader sent requests alone.
    assert heard == [("trainer-3", NextBatch(0, 3, 4)), ("trainer-3", NextBatch(1, 3, 4))]
    expected = [0, 3, [0, 1, 2, 3, 4], 0.5, {"x": (1.0, 2.0, "mean")}, None]
    assert fetched == [expected, expected]


def receive_in_pieces(payload_bytes: int) -> tuple[bool, float]:
    """Whether the frame arrived whole, and this rank's peak of memory meanwhile over its size."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    frame = None
    if group.rank() == 0:
        frame = bytearray(payload_bytes)
        frame[PIECE_BYTES - 1], frame[-1] = 3, 4
    broadcast(bytearray(1) if group.rank() == 0 else None, group)  # what a first one allocates
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = peak_bytes()
    received = broadcast(frame, group)
    grown = peak_bytes() - before
    dist.barrier()
    is_whole = len(received) == payload_bytes
    return is_whole and (received[PIECE_BYTES - 1], received[-1]) == (3, 4), grown / payload_bytes


def peak_bytes() -> int:
    """Resident memory of this process at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def test_a_frame_crosses_a_replica_in_pieces_and_is_held_once_by_each_rank() -> None:
    for rank, (is_whole, copies) in enumerate(run_ranks(receive_in_pieces, 2, 2 * PIECE_BYTES + 8)):
        assert is_whole
        # The leader has its frame before the broadcast.
        assert copies < (0.1 if rank == 0 else 1.1), copies
