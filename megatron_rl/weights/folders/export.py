"""The sharded model as a stream of full Hugging Face tensors. Runs on every trainer rank.

    export_tensors -> (name, tensor) one by one -> save_hf -> a folder

A rank that waits for rank 0 in a collective fails after `expert.train.collective_timeout_s`; on a
device the watchdog of its group ends it. So ranks wait for a key in the rendezvous store:

| key | set by | deleted by | says |
|---|---|---|---|
| `export/N/call/NAME/RANK` | rank 0 | the rank | send your slices of this tensor now |
| `export/N/over` | rank 0 | rank 0, when all have seen it | all is done |
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_rl.config.tree import Config
from megatron_rl.protocol.disk_room import write_when_room
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.weights.folders.hf_folder import (
    SHARD_BYTES,
    NamedTensor,
    as_in_source,
    open_origin,
    write_config,
    write_tensors,
)
from megatron_rl.weights.folders.model_files import ModelFiles, carried_files
from megatron_rl.weights.folders.staging import staged
from megatron_rl.weights.layout.local_names import named_tensors
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.ranks import all_places
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Slice, as_matrix, local_part
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trainer_slices, untrained

# All ranks count alike, because all take part in each export.
_exports = itertools.count()


class ExportCalls:
    """Calls of rank 0 to the other ranks in one export."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: longest time between two calls of rank 0."""
        self._prefix = f"export/{next(_exports)}"
        self._patience_s = patience_s

    @functools.cached_property
    def _store(self) -> dist.Store:
        # A second connection: torch's threads use the other one, which a wait would keep. Made
        # when it is needed: rank 0 may be done with a rank that has nothing to send, and gone.
        store = distributed_c10d._get_default_store().clone()
        return dist.PrefixStore(self._prefix, store)

    def call(self, name: str, ranks: Iterable[int]) -> None:
        """On rank 0: let these ranks send."""
        for rank in ranks:
            self._store.set(f"call/{name}/{rank}", b"")

    def await_call(self, name: str, rank: int) -> None:
        """On another rank: wait until rank 0 calls for this tensor. Raises DeadlineExceeded."""
        key = f"call/{name}/{rank}"
        self._wait(key, f"ask for its slices of {name}")
        self._store.delete_key(key)

    def end(self) -> None:
        """Return when rank 0 has finished. Every rank calls it. Raises DeadlineExceeded."""
        if dist.get_rank() == 0:
            self._store.set("over", b"")
        else:
            self._wait("over", "finish the export")
        # Short, as all are here: the store may lie in rank 0, which must not leave before.
        dist.barrier()
        if dist.get_rank() == 0:
            self._store.delete_key("over")

    def _wait(self, key: str, what: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=self._patience_s))
        except dist.DistStoreError as error:
            raise DeadlineExceeded(
                f"trainer rank 0 did not {what} within {self._patience_s:.0f} s"
            ) from error


PATIENCE_S = 1800.0
"""Seconds that ranks wait for rank 0, which may write to a slow disk."""


@torch.no_grad()
def export_tensors(
    model: Sequence[torch.nn.Module], shape: ModelShape, patience_s: float = PATIENCE_S
) -> Iterator[NamedTensor]:
    """Full HF tensors, in the compute dtype or `untrained` in float32, without vocabulary padding.

    Every rank must iterate to the end; world rank 0 yields all tensors, the others yield none.
    Tensors come one at a time in the order of `hf_shapes`: rank 0 holds one full tensor and one
    rank's part of it besides its shards. patience_s: rank 0 may take this long over tensors between
    two that another rank has part in, which raises DeadlineExceeded there if it takes longer.
    """
    parameters = named_tensors(model)
    rank, calls = dist.get_rank(), ExportCalls(patience_s)
    sent = senders(shape, all_places(model[0].config))
    for name, size in hf_shapes(shape).items():
        if rank == 0:
            calls.call(name, (giver for giver in sent[name] if giver != 0))
            full = _empty(name, size, shape, parameters)
            yield name, _assemble(full, sent[name], parameters)
        elif rank in sent[name]:
            # Sent only when rank 0 receives: the others do not wait in a collective meanwhile.
            calls.await_call(name, rank)
            _transfer(dist.isend, _flat(parameters, sent[name][rank]), 0)


def _transfer(operation: Callable[..., object], flat: Tensor, peer: int) -> None:
    """Send to a rank, or receive from it."""
    # In a batch, even if of one: alone, NCCL would make a communicator for each pair.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, flat, peer)]):
        work.wait()


@lru_cache(maxsize=1)
def senders(shape: ModelShape, places: tuple[Place, ...]) -> dict[str, dict[int, list[Slice]]]:
    """HF tensor -> world rank -> the slices that rank sends; together each element once.

    The lowest replica sends, so that rank 0 uses its own slices. places: of every world rank.
    """
    sent: dict[str, dict[int, list[Slice]]] = {name: {} for name in hf_shapes(shape)}
    given: set[tuple[str, int, int]] = set()
    first_ranks = {place: rank for rank, place in reversed(list(enumerate(places)))}
    for place, rank in sorted(first_ranks.items(), key=lambda item: item[1]):
        for part in trainer_slices(shape, place):
            corner = (part.hf, part.row, part.column)
            if corner not in given:
                given.add(corner)
                sent[part.hf].setdefault(rank, []).append(part)
    return sent


def _empty(
    name: str, size: tuple[int, ...], shape: ModelShape, parameters: dict[str, Tensor]
) -> Tensor:
    """New memory for an HF tensor, as the ranks' parts of it have it."""
    # New each time: a yielded tensor never aliases a parameter that the next step changes.
    like = next(iter(parameters.values()))
    return like.new_empty(size, dtype=torch.float32 if name in untrained(shape) else like.dtype)


def _assemble(full: Tensor, parts: dict[int, list[Slice]], parameters: dict[str, Tensor]) -> Tensor:
    """Fill a full tensor on rank 0 with the slices that it has and those it receives."""
    matrix = as_matrix(full)
    for rank, slices in parts.items():
        if rank == 0:
            flat = _flat(parameters, slices)
        else:
            flat = full.new_empty(sum(part.size for part in slices))
            _transfer(dist.irecv, flat, rank)
        for part, values in zip(slices, flat.split([s.size for s in slices]), strict=True):
            area = matrix[part.row : part.row + part.rows]
            area = area[:, part.column : part.column + part.columns]
            area.copy_(values.view(part.rows, part.columns))
    return full


def _flat(parameters: dict[str, Tensor], slices: Sequence[Slice]) -> Tensor:
    """The elements of the slices, concatenated."""
    return torch.cat([local_part(parameters, part).reshape(-1) for part in slices])


def save_hf(
    folder: Path,
    model: Sequence[torch.nn.Module],
    shape: ModelShape,
    *,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
    replaces: bool = False,
    run: Config | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Write the model as a Hugging Face folder; every rank must call it.

    Configuration and tokenizer files are copied from `source`, and tensors outside of the model
    that is trained; run: that trained the model, with its chat template and end tokens. The folder
    appears at once, when complete; replaces: in place of an older one, which is a FileExistsError
    without it. Ranks other than 0 return when it is there, or raise DeadlineExceeded after
    patience_s without news.
    """
    calls, tensors = ExportCalls(patience_s), export_tensors(model, shape, patience_s)
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
    else:
        # The others wait for patience_s: the error of rank 0, which names the cause, comes first.
        limit_s = 0.9 * patience_s

        def write_rest() -> None:
            ModelFiles(tuple(carried_files(source)), run).write(staging)
            values = json.loads((source / "config.json").read_text())
            write_config(values, staging, next(model[0].parameters()).dtype)

        with staged(folder, replaces=replaces) as staging, ExitStack() as stack:
            whole = as_in_source(tensors, shape, open_origin(source, shape, stack))
            write_tensors(staging, whole, shard_bytes, limit_s=limit_s)
            write_when_room(staging, write_rest, limit_s=limit_s)
    calls.end()
