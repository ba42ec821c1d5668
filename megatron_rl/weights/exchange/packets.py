"""A parcel's packets: what lies where at one end, copied, digested and checked.

Shared by trainer ranks and engines; needs torch alone. A parcel travels in packets:

| packet | holds | where it is sent from and received into |
|---|---|---|
| one for each move of at least ALONE_BYTES | its elements | the parameter, if it is one run there |
| the last | the other moves' elements, then the parcel's digest and version | a buffer |

A parcel's digest is computed from its packets' digests. So a sender can digest a packet that lies
in a parameter before the transfer, and a receiver each packet when it arrives.

Both ends know the packets from the plan; whether a large move needs a buffer, each end sees for
itself. In shared memory every move needs one, at the sender; by way of files, at both ends.

A digest is 128 bits as two int64. Both ends keep their parameters in the same kind of memory, so
they choose the same digest: in host memory XXH3, one pass at the memory's speed; on a device sums
of words, which need no copy to the host.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megatron_rl.weights.exchange.plan import Move, Parcel
from megatron_rl.weights.layout.slices import as_matrix

WORDS = 2
_BLOCK_WORDS = 4096
_PLACE = 0x9E3779B1
"""Odd and above any count of blocks: no two words have the same weight."""


def digest(payload: Tensor) -> Tensor:
    """[2] int64, on the payload's device. payload: [bytes] uint8, a multiple of 8 of them."""
    if payload.device.type != "cpu":
        return word_sums(payload)
    return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(payload.numpy())), dtype=torch.int64)


def fold(digests: Sequence[Tensor]) -> Tensor:
    """One digest of several in their order: [2] int64."""
    return digest(torch.cat(list(digests)).view(torch.uint8))


def word_sums(payload: Tensor) -> Tensor:
    """The sum of 64-bit words, and the same weighted by their block and their place in it.

    Both modulo 2^64. Any change of a single word changes the first, exchanged words change the
    second. payload: [bytes] uint8, whose last block may be short.
    """
    words = payload.view(torch.int64)
    count = words.numel() // _BLOCK_WORDS
    blocks, rest = words[: count * _BLOCK_WORDS], words[count * _BLOCK_WORDS :]
    blocks = blocks.view(count, _BLOCK_WORDS)
    by_block = torch.cat([blocks.sum(1), rest.sum().unsqueeze(0)])
    by_place = blocks.sum(0)
    by_place[: rest.numel()] += rest
    return torch.stack([by_block.sum(), _weighted(by_block) + _PLACE * _weighted(by_place)])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(sums.numel(), device=sums.device)).sum()


TRAILER_BYTES = 8 * (WORDS + 1)
ALONE_BYTES = 256 << 10
"""Moves from this size on are separate packets: that costs less than copying them."""
_ALIGNMENT = 8


@dataclass
class Packet:
    """A part of a parcel that travels by itself, as one end sees it."""

    places: list[Tensor]
    """Where the elements of its moves lie in the parameters: [rows, columns] each."""
    payload_bytes: int
    data: Tensor | None = None
    """Its bytes: [nbytes] uint8. The parameter's own if it is not staged, else a buffer."""
    is_staged: bool = True
    is_last: bool = False
    """Then a trailer follows the payload."""
    digest: Tensor | None = None
    """Of the payload, at a sender that knows it already."""

    @property
    def nbytes(self) -> int:
        """Length."""
        return self.payload_bytes + (TRAILER_BYTES if self.is_last else 0)

    @property
    def payload(self) -> Tensor:
        """[payload_bytes] uint8."""
        assert self.data is not None
        return self.data[: self.payload_bytes]

    @property
    def trailer(self) -> Tensor:
        """[3] int64, of the last packet: the parcel's digest, and its version."""
        assert self.data is not None and self.is_last
        return self.data[self.payload_bytes :].view(torch.int64)

    def staged(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """(place in a parameter, the same elements in the buffer) of each move, if it is staged."""
        start = 0
        for place in self.places if self.is_staged else ():
            end = start + place.numel() * dtype.itemsize
            yield place, self.payload[start:end].view(dtype).view(place.shape)
            start = end


class ParcelEnd(NamedTuple):
    """A parcel as one end sees it."""

    peer: int
    packets: list[Packet]
    moves: Sequence[Move]

    @property
    def nbytes(self) -> int:
        """Length of all packets."""
        return sum(packet.nbytes for packet in self.packets)


def end_of(
    parameters: dict[str, Tensor],
    parcel: Parcel,
    dtype: torch.dtype,
    *,
    is_sender: bool,
    stages_all: bool = False,
) -> ParcelEnd:
    """One end of a parcel; the packets that are staged lack their buffers yet."""
    alone, together, size = [], [], 0
    for move in parcel.moves:
        place = _place(parameters, move, is_sender=is_sender)
        nbytes = move.size * dtype.itemsize
        # By the plan alone, which both ends know: they must agree on the packets of a parcel.
        if nbytes >= ALONE_BYTES and nbytes % _ALIGNMENT == 0:
            data = None if stages_all else _bytes_in_place(place, dtype)
            alone.append(Packet([place], nbytes, data, is_staged=data is None))
        else:
            together.append(place)
            size += nbytes
    padded = -(-size // _ALIGNMENT) * _ALIGNMENT
    packets = [*alone, Packet(together, padded, is_last=True)]
    return ParcelEnd(parcel.receiver if is_sender else parcel.sender, packets, parcel.moves)


def _place(parameters: dict[str, Tensor], move: Move, *, is_sender: bool) -> Tensor:
    name, row, column = move[2:5] if is_sender else move[5:8]
    return as_matrix(parameters[name])[row : row + move.rows, column : column + move.columns]


def _bytes_in_place(place: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A part of a parameter as the bytes of a packet; None where it is no such run of bytes."""
    # Digests read whole 64-bit words, so the bytes must begin where such a word may.
    if place.dtype != dtype or not place.is_contiguous() or place.data_ptr() % _ALIGNMENT:
        return None
    return place.view(-1).view(torch.uint8)


def digest_in_place(packets: Iterable[Packet]) -> None:
    """At a sender, ahead of `pack`: the digests of what is sent from where it lies."""
    for packet in packets:
        if not packet.is_staged:
            packet.digest = digest(packet.payload)


def pack(packets: Sequence[Packet], dtype: torch.dtype, *, version: int) -> None:
    """Copy what is staged into the buffers, and write the trailer.

    Digests that are known already must be of what the parameters hold now.
    """
    last = packets[-1]
    # Padding lies in no move, but is digested too: it must be the same at both ends.
    last.payload[-_ALIGNMENT:] = 0
    for packet in packets:
        for place, held in packet.staged(dtype):
            held.copy_(place)
    last.trailer[:WORDS] = fold(
        [digest(packet.payload) if packet.digest is None else packet.digest for packet in packets]
    )
    last.trailer[WORDS] = version


def unpack(packets: Iterable[Packet], dtype: torch.dtype, version: int) -> Tensor:
    """Copy what is staged to the parameters; whether the parcel is damaged, a bool on the device.

    packets: a parcel's; one that is yielded has arrived.
    """
    contents = []
    for packet in packets:
        # Digest before the copy and packet by packet, while the processor's cache still holds it.
        contents.append(digest(packet.payload))
        for place, held in packet.staged(dtype):
            place.copy_(held)
    assert contents and packet.is_last
    is_whole = (fold(contents) == packet.trailer[:WORDS]).all()
    return ~(is_whole & (packet.trailer[WORDS] == version))


def give_back(parcels: Iterable[ParcelEnd]) -> None:
    """Keep no buffer: its memory may go."""
    for packet in (packet for end in parcels for packet in end.packets if packet.is_staged):
        packet.data = None
