"""Parcels through a folder or an object store that trainer ranks write and engine ranks read.

Shared by trainer ranks and engines; needs torch, messages, fsspec and zstandard alone. For links
that are slow, or that no collective crosses. A parcel is one compressed file, which all engines
read. Where the engines hold the version that the sender sent last, the file has the difference:
each bit that changed. After a step of RL most bits of bfloat16 weights are as before.

A sender says where a parcel lies by the key `full/ATTEMPT/SENDER/RECEIVER/K` of the store, whose
value is a `_Files`; K counts the parcels of one sender to one receiver.

A file holds a parcel's trailer and one zstd frame of its payload: the first bytes of all elements,
then the second ones, and so on, because exponents compress well. The trailer's digest is of the
whole payload, also in a difference: an engine with other parameters than it claims finds the parcel
damaged.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zstandard
from torch import Tensor

from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.orders import Call
from megatron_rl.weights.exchange.packets import TRAILER_BYTES, Packet
from megatron_rl.weights.exchange.plan import Plan
from megatron_rl.weights.exchange.transport import Round, Transport, Wait

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


class FolderTransport(Transport):
    """Files that this rank writes, or reads. Its buffers are in host memory."""

    stages_all = True

    def __init__(
        self, store: dist.Store, rank: int, device: torch.device, folder: Folder,
        dtype: torch.dtype, syncer: str = "",
    ) -> None:  # fmt: skip
        """dtype: of the elements. syncer: on a sender, part of the files' names."""
        super().__init__(store, rank, device)
        self._folder, self._dtype, self._syncer = folder, dtype, syncer
        self._sent: dict[tuple[int, str], tuple[int, Bytes]] = {}
        """What a sender sent last, by layouts and parcel, with its version: as many bytes in host
        memory as it sends."""
        self._pool: ThreadPoolExecutor | None = None
        self._keys: list[str] = []
        """Keys that this sender has set in the last transfer."""
        self._names: list[str] = []
        """Files that it has written."""

    def begin(self, call: Call, plan: Plan, *, replica: str = "", holds: int = -1) -> None:
        self.close()
        super().begin(call, plan, replica=replica, holds=holds)
        self._adds = 0 <= holds == call.base
        self.file_bytes = 0
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="folder")

    def _allocate(self, size: int) -> Tensor:
        # A device reaches pinned memory without a copy by the driver.
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type != "cpu")

    def _contents(self, parcels: Round) -> list[Bytes]:
        """What `lend` gave each parcel: all of its packets are staged."""
        memory, sizes = self._halves[self._half], [end.nbytes for end in parcels]
        return (
            [part.numpy() for part in memory[: sum(sizes)].split(sizes)]
            if memory is not None
            else []
        )

    def send(self, parcels: Round) -> Wait:
        """Compress and write the parcels, in threads; the wait says where each lies."""
        assert self._pool is not None
        writing = []
        for end, content in zip(parcels, self._contents(parcels), strict=True):
            key = self._next_key("full", self._rank, end.peer)
            self._keys.append(key)
            writing.append((key, self._pool.submit(self._put, self._call, key, content)))

        def announce() -> None:
            for key, files in writing:
                self._store.set(key, msgspec.json.encode(self._result(files)))

        return announce

    def _put(self, call: Call, key: str, content: Bytes) -> _Files:
        payload, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
        _, attempt, parcel = key.split("/", 2)
        version, held = self._sent.get((call.layouts, parcel), (-1, None))
        before = held if version == call.base >= 0 else None
        name = f"{self._syncer}/{attempt}.{parcel.replace('/', '.')}"
        files = _Files(
            f"{name}.whole" if before is None or call.needs_whole else "",
            "" if before is None else f"{name}.difference",
        )
        if files.whole:
            self._write(files.whole, payload, trailer)
        if before is not None:
            self._write(files.difference, before ^ payload, trailer)
        if call.keeps:
            kept = np.empty_like(payload) if held is None else held
            kept[:] = payload
            self._sent[call.layouts, parcel] = call.version, kept
        return files

    def _write(self, name: str, payload: Bytes, trailer: Bytes) -> None:
        planes = np.ascontiguousarray(payload.reshape(-1, self._dtype.itemsize).T)
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(planes.data)
        self._names.append(name)
        self._folder.write(name, trailer.tobytes() + packed)

    def receive(self, parcels: Round, onward: Round) -> Wait:
        """The wait reads the files of the round, in threads; none is handed on."""
        keys = [self._next_key("full", end.peer, self._rank) for end in parcels]
        contents = self._contents(parcels)

        def read() -> None:
            assert self._pool is not None
            if keys:
                self._store.wait(keys, self.left())
            reading = []
            for key, end, content in zip(keys, parcels, contents, strict=True):
                files = msgspec.json.decode(self._store.get(key), type=_Files)
                reading.append(self._pool.submit(self._get, files, end.packets, content))
            self.file_bytes += sum(self._result(each) for each in reading)

        return read

    @torch.no_grad()  # Its own threads would record copies of parameters.
    def _get(self, files: _Files, packets: Sequence[Packet], content: Bytes) -> int:
        """Read a parcel into its buffer, which its packets share; returns the bytes of its file."""
        payload, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
        adds = bool(files.difference) and self._adds
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

    def _result(self, future: Future[T]) -> T:
        left_s = self.left().total_seconds()
        try:
            return future.result(left_s)
        except TimeoutError as error:
            raise RuntimeError(
                f"the folder (expert.weights.folder) took longer than {left_s:.0f} s"
            ) from error

    def close(self) -> None:
        """Remove what the last transfer has left: every engine has read it, or has failed."""
        if self._pool is not None:
            # Not even a thread that the folder holds up is waited for.
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.remove(self._names)
        for key in self._keys:
            self._store.delete_key(key)
        self._pool, self._names, self._keys = None, [], []
