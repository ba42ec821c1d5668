"""Parcels through a folder or an object store that trainer ranks write and engine ranks read.

Shared by trainer ranks and engines; needs torch, messages, fsspec and zstandard alone. For links
that are slow, or that no collective crosses. A parcel is one compressed file, which all engines
read. Where the engines hold the version that the sender sent last, the file has the difference:
each bit that changed. After a step of RL most bits of bfloat16 weights are as before.

Both sides speak about the files by keys of the store; K counts the parcels of one sender to one
receiver:

| key | set by | says |
|---|---|---|
| `full/ATTEMPT/SENDER/RECEIVER/K` | sender | `_Files`: where the parcel lies |

A file holds a parcel's trailer and one zstd frame of its payload: the first bytes of all elements,
then the second ones, and so on, because exponents compress well. The trailer's digest is of the
whole payload, also in a difference: an engine with other parameters than it claims finds the parcel
damaged.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zstandard

from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.group import Patience, Work
from megatron_rl.weights.exchange.packets import TRAILER_BYTES, Packet
from megatron_rl.weights.exchange.transport import Buffers, Parcels, Round, deal, parcel_key

T = TypeVar("T")
Bytes = np.ndarray
"""[bytes] uint8."""
THREADS = 4
"""Of a rank: they compress or decompress parcels, and wait for the folder."""
_LEVEL = 1
"""zstd's fastest ordinary level: a link of 1 GB/s would wait for higher ones."""


class _Files(msgspec.Struct, frozen=True):
    """Names of a parcel's files in the folder; "": there is none."""

    whole: str = ""
    difference: str = ""


class SentParcels:
    """What a sender sent last, by parcel: as many bytes in host memory as it sends."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], tuple[int, Bytes]] = {}

    def replace(self, key: tuple[int, int, int], version: int, payload: Bytes) -> None:
        """key: layouts, receiver, number. The payload is copied."""
        _, held = self._held.get(key, (-1, None))
        if held is None:
            held = np.empty_like(payload)
        held[:] = payload
        self._held[key] = version, held

    def get(self, key: tuple[int, int, int], version: int) -> Bytes | None:
        """The payload of that version; None: another one is held, or none."""
        found, held = self._held.get(key, (-1, None))
        return held if found == version and version >= 0 else None


class FolderTransport:
    """One end of a transfer."""

    def __init__(
        self,
        folder: Folder,
        store: dist.Store,
        order: Round,
        rank: int,
        *,
        dtype: torch.dtype,
        buffers: Buffers,
        is_pinned: bool,
        syncer: str = "",
        sent: SentParcels | None = None,
        holds: int = -1,
    ) -> None:
        """rank: in the plan. dtype: of the elements. buffers: in host memory.

        is_pinned: the parameters lie on a device. syncer, sent: of a sender. holds: version that a
        receiver's parameters hold, to which a difference may be added; -1: none.
        """
        self._folder, self._store, self._order, self._rank = folder, store, order, rank
        self._dtype, self._buffers, self._is_pinned = dtype, buffers, is_pinned
        self._syncer, self._sent, self._holds = syncer, sent, holds
        self._counts: Counter[int] = Counter()
        self._lent: list[Bytes] = []
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="folder")
        self.keys: list[str] = []
        """Keys that this sender has set."""
        self.names: list[str] = []
        """Files that it has written."""
        self.file_bytes = 0
        """Bytes of files that a receiver has read."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes of buffers at once."""
        return self._buffers.nbytes

    def lend(self, parcels: Parcels, patience: Patience, *, is_sender: bool) -> None:
        """In the space of the last but one round, whose packets have been written or copied."""
        sizes = [sum(packet.nbytes for packet in packets) for packets in parcels]
        memory = self._buffers.next(sum(sizes), torch.device("cpu"), is_pinned=self._is_pinned)
        deal(list(chain.from_iterable(parcels)), memory)
        self._lent = [part.numpy() for part in memory[: sum(sizes)].split(sizes)]

    def send(self, receivers: Sequence[int], parcels: Parcels) -> list[list[Work]]:
        """Compress and write the parcels, in threads; the work of a parcel says where it lies."""
        works: list[list[Work]] = []
        for receiver, content in zip(receivers, self._lent, strict=True):
            number = self._next(receiver)
            key = parcel_key("full", self._order.attempt, self._rank, receiver, number)
            self.keys.append(key)
            name = f"{self._syncer}/{self._order.attempt}.{self._rank}.{receiver}.{number}"
            parcel = self._order.layouts, receiver, number
            works.append([_Writing(self, key, self._pool.submit(self._put, name, parcel, content))])
        return works

    def _put(self, name: str, parcel: tuple[int, int, int], content: Bytes) -> _Files:
        assert self._sent is not None
        payload, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
        before = self._sent.get(parcel, self._order.base)
        files = _Files(
            f"{name}.whole" if before is None or self._order.needs_whole else "",
            "" if before is None else f"{name}.difference",
        )
        if files.whole:
            self._write(files.whole, payload, trailer)
        if before is not None:
            self._write(files.difference, before ^ payload, trailer)
        if self._order.keeps:
            self._sent.replace(parcel, self._order.version, payload)
        return files

    def _write(self, name: str, payload: Bytes, trailer: Bytes) -> None:
        planes = np.ascontiguousarray(payload.reshape(-1, self._dtype.itemsize).T)
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)
        self.names.append(name)
        self._folder.write(name, trailer.tobytes() + packed)

    def announce(self, key: str, files: _Files) -> None:
        """Say where a parcel lies."""
        self._store.set(key, msgspec.json.encode(files))

    def receive(
        self, senders: Sequence[int], parcels: Parcels, onward: Parcels
    ) -> tuple[list[list[Work]], list[Work]]:
        """A single work for the round, which reads its files; none is handed on."""
        attempt = self._order.attempt
        keys = [parcel_key("full", attempt, each, self._rank, self._next(each)) for each in senders]
        arrival = _Reading(self, self._pool, keys, parcels, self._lent)
        return [[arrival] * len(packets) for packets in parcels], []

    def await_files(self, keys: Sequence[str], timeout: timedelta) -> list[_Files]:
        """Where these parcels lie."""
        if keys:
            self._store.wait(list(keys), timeout)
        return [msgspec.json.decode(self._store.get(key), type=_Files) for key in keys]

    @torch.no_grad()  # Its own threads would record copies of parameters.
    def get(self, files: _Files, packets: Sequence[Packet], content: Bytes) -> int:
        """Read a parcel into its buffer, which its packets share; returns the bytes of its file."""
        payload, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
        adds = bool(files.difference) and 0 <= self._holds == self._order.base
        packed = self._folder.read(files.difference if adds else files.whole)
        trailer[:] = np.frombuffer(packed, np.uint8, TRAILER_BYTES)
        try:
            planes = zstandard.ZstdDecompressor().decompress(
                memoryview(packed)[TRAILER_BYTES:], max_output_size=payload.size
            )
        except zstandard.ZstdError as error:
            raise RuntimeError(f"a parcel's file is damaged: {error}") from error
        if len(planes) != payload.size:
            raise RuntimeError(f"a parcel's file has {len(planes)} bytes, not {payload.size}")
        size = self._dtype.itemsize
        elements = np.frombuffer(planes, np.uint8).reshape(size, -1).T
        if not adds:
            payload.reshape(-1, size)[:] = elements
            return len(packed)
        # What no move fills is padding, which is 0 at both ends.
        packets[-1].payload[-8:] = 0
        for place, held in chain.from_iterable(each.staged(self._dtype) for each in packets):
            held.copy_(place)
        payload.reshape(-1, size)[:] ^= elements
        return len(packed)

    def release(self, senders: Sequence[int]) -> None:
        """Nothing: files stay until the sender's next transfer."""

    def finish(self, patience: Patience) -> None:
        """Nothing: `close` ends the threads."""

    def close(self) -> None:
        """End the threads, but for one that the folder holds up."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self, peer: int) -> int:
        self._counts[peer] += 1
        return self._counts[peer] - 1


class _Writing:
    """A parcel that is being written."""

    def __init__(self, transport: FolderTransport, key: str, files: Future[_Files]) -> None:
        self._transport, self._key, self._files = transport, key, files

    def wait(self, timeout: timedelta) -> None:
        """Until it is there, and said to be."""
        self._transport.announce(self._key, _result(self._files, timeout))


class _Reading:
    """A round of parcels that senders have written, or will write."""

    def __init__(
        self,
        transport: FolderTransport,
        pool: ThreadPoolExecutor,
        keys: Sequence[str],
        parcels: Parcels,
        contents: Sequence[Bytes],
    ) -> None:
        self._transport, self._pool = transport, pool
        self._keys, self._parcels, self._contents = keys, parcels, contents
        self._is_over = False

    def wait(self, timeout: timedelta) -> None:
        """Until all are in their buffers."""
        if self._is_over:
            return
        files = self._transport.await_files(self._keys, timeout)
        get: Callable[..., int] = self._transport.get
        triples = zip(files, self._parcels, self._contents, strict=True)
        for each in [self._pool.submit(get, *triple) for triple in triples]:
            self._transport.file_bytes += _result(each, timeout)
        self._is_over = True


def _result(future: Future[T], timeout: timedelta) -> T:
    try:
        return future.result(timeout.total_seconds())
    except TimeoutError as error:
        raise RuntimeError(
            f"the folder (expert.weights.folder) took longer than {timeout.total_seconds():.0f} s"
        ) from error


class FolderEnd:
    """What a rank keeps from one transfer to the next."""

    def __init__(
        self, folder: Folder, store: dist.Store, dtype: torch.dtype, syncer: str = ""
    ) -> None:
        """dtype: of elements in the files. syncer: on a sender, part of their names."""
        self._folder, self._store, self._dtype, self._syncer = folder, store, dtype, syncer
        self._sent = SentParcels()
        self._last: FolderTransport | None = None

    def open(
        self, order: Round, rank: int, device: torch.device, buffers: Buffers, *, holds: int = -1
    ) -> FolderTransport:
        """The transport of a transfer. device: of the parameters. rank, holds: see there."""
        self.clear()
        self._last = FolderTransport(
            self._folder,
            self._store,
            order,
            rank,
            dtype=self._dtype,
            buffers=buffers,
            is_pinned=device.type != "cpu",
            syncer=self._syncer,
            sent=self._sent,
            holds=holds,
        )
        return self._last

    def clear(self) -> None:
        """Remove what the last transfer has left: every engine has read it, or has failed."""
        last, self._last = self._last, None
        if last is None:
            return
        last.close()
        self._folder.remove(last.names)
        for key in last.keys:
            self._store.delete_key(key)
