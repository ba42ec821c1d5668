"""Format of RUN/batches: the batches of the latest steps, as they were dealt to ranks.

The rollout queue writes a batch before any rank gets its share. A trainer that was restarted reads
the batches since its checkpoint, so that it repeats the same steps.

NNNNNN.batch: int64 numbers (data-parallel size; bytes and checksum of each rank's share), then the
share of each rank: the frames of its RankBatch, joined.

NNNNNN.queue.json: the queue's state after NNNNNN batches, written before the checkpoint of that
step. A checkpoint that was lost is rebuilt with it (`megatron-rl replay --rebuild`).
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.frames import (
    Frame,
    decode_frames,
    encode_frames,
    joined_parts,
    split_frames,
)
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.sequence_cost import SequenceCost
from megatron_rl.protocol.types import MinibatchShare, RankBatch
from megatron_rl.protocol.whole_file import write_whole

BATCHES = "batches"
"""Folder in the run folder."""
_NAME = re.compile(r"(\d{6,})(\.batch|\.queue\.json)")
_BATCH, _STATE = ".batch", ".queue.json"


def _path(folder: Path, step: int) -> Path:
    return folder / f"{step:06d}{_BATCH}"


def write_batch(folder: Path, shares: Sequence[RankBatch]) -> None:
    """Write a batch, whole or not at all; shares: of all ranks, in order. Raises OSError."""
    numbers, content = [len(shares)], list[Frame]()
    for share in shares:
        parts = joined_parts(encode_frames(share))
        numbers += [sum(map(len, parts)), _checksum(parts)]
        content += parts
    content.insert(0, np.array(numbers, np.int64).tobytes())
    write_whole(_path(folder, shares[0].step), content, is_private=True)


def read_share(folder: Path, step: int, rank: int) -> tuple[int, bytearray]:
    """(data-parallel size, joined frames of a rank's share). Raises InputError.

    The frames are empty for a rank that the batch was not dealt to.
    """
    path = _path(folder, step)
    try:
        with path.open("rb") as file:
            size = int(np.frombuffer(file.read(8), np.int64)[0])
            table = np.frombuffer(file.read(16 * size), np.int64).reshape(size, 2)
            if rank >= size:
                return size, bytearray()
            file.seek(int(table[:rank, 0].sum()), 1)
            share = bytearray(file.read(int(table[rank, 0])))
    except OSError as error:
        raise InputError(f"the batch {path} cannot be read: {error}") from error
    except (ValueError, IndexError) as error:
        raise _damaged(path) from error
    if len(share) != table[rank, 0] or _checksum([share]) != table[rank, 1]:
        raise _damaged(path)
    return size, share


def _checksum(parts: Sequence[Frame | bytearray]) -> int:
    """Sum of the 64-bit words of joined frames, whose parts are filled up with zeros, modulo 2**63.

    It finds what disks do: lost pages and flipped bits. A CRC takes a tenth of the queue's time.
    """
    found = 0
    for part in parts:
        words = len(part) // 8
        found += int(np.frombuffer(part, "<u8", words).sum(dtype=np.uint64))
        found += int.from_bytes(part[8 * words :], "little")
    return found % 2**63


def _damaged(path: Path) -> InputError:
    return InputError(
        f"the batch {path} is damaged. An unfinished run resumes from its newest checkpoint with "
        "new batches: start it again. A replay works for steps before this batch, and for those "
        "after a later checkpoint"
    )


def read_batch(folder: Path, step: int) -> list[RankBatch]:
    """The shares of all ranks, in order. Raises InputError."""
    size, first = read_share(folder, step, 0)
    others = [read_share(folder, step, rank)[1] for rank in range(1, size)]
    return [decode_frames(split_frames(share), RankBatch) for share in (first, *others)]


def deal_again(
    shares: Sequence[RankBatch], dp_size: int, *, budget_tokens: int, cost: SequenceCost
) -> list[RankBatch]:
    """The same batch for another number of ranks, as the queue would have dealt it."""
    minibatches = zip(*(share.minibatches for share in shares), strict=True)
    dealt = [_deal_minibatch(parts, dp_size, budget_tokens, cost) for parts in minibatches]
    first = shares[0]
    return [
        RankBatch(first.step, rank, list(of_rank), first.metrics if rank == 0 else {})
        for rank, of_rank in enumerate(zip(*dealt, strict=True))
    ]


def _deal_minibatch(
    parts: Sequence[MinibatchShare], dp_size: int, budget_tokens: int, cost: SequenceCost
) -> list[MinibatchShare]:
    sequences = [one for part in parts for microbatch in part.microbatches for one in microbatch]
    sequences.sort(key=lambda one: (one.group, one.member))
    lengths = [len(one.token_ids) for one in sequences]
    ranks = deal(lengths, budget_tokens=budget_tokens, dp_size=dp_size, cost=cost)
    return [
        msgspec.structs.replace(
            parts[0], microbatches=[[sequences[i] for i in indices] for indices in of_rank]
        )
        for of_rank in ranks
    ]


def state_name(step: int) -> str:
    """Name of the file with the queue's state after so many batches."""
    return f"{step:06d}{_STATE}"


def write_state(folder: Path, state: QueueState) -> None:
    """Write the queue's state of a checkpoint, whole or not at all. Raises OSError."""
    write_whole(folder / state_name(state.step), msgspec.json.encode(state), is_private=True)


def stored_steps(folder: Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.glob(f"*{_BATCH}"))
    return sorted(int(match[1]) for match in names if match)


def remove_batches(folder: Path, *, before: int = 0, since: int | None = None) -> None:
    """Remove batches of steps below `before`, and of `since` and later steps. Raises OSError.

    States of the queue before `before` and after `since` are removed too.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) is None:
            continue
        step, is_state = int(match[1]), match[2] == _STATE
        if step < before or (since is not None and step >= since + is_state):
            path.unlink(missing_ok=True)
