"""A parcel as messages: what lies where at one end, copied, digested and checked.

Shared by trainer ranks and engines; needs torch alone. A parcel travels in messages:

| message | holds | where it is sent from and received into |
|---|---|---|
| one for each move of at least ALONE_BYTES | its elements | the parameter, if it is one run there |
| the last | the other moves' elements, then the parcel's digest and version | a buffer |

The digest of a parcel is one of its messages' digests, so that each of these can be taken when its
bytes are at hand: at a sender before the transfer, where they lie in a parameter.

Both ends know the messages from the plan; whether a large move needs a buffer, each end sees for
itself. In shared memory every move needs one, at the sender.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.weights.memory.digests import WORDS, digest, fold
from megatron_rl.weights.reshard import Move, Parcel
from megatron_rl.weights.slices import as_matrix

TRAILER_BYTES = 8 * (WORDS + 1)
ALONE_BYTES = 256 << 10
"""A message of its own costs less than copying so much."""
_ALIGNMENT = 8


@dataclass
class Message:
    """One message of a parcel, as one end sees it."""

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
    def elements(self) -> int:
        """Without the payload's padding."""
        return sum(place.numel() for place in self.places)

    @property
    def payload(self) -> Tensor:
        """[payload_bytes] uint8."""
        assert self.data is not None
        return self.data[: self.payload_bytes]

    @property
    def trailer(self) -> Tensor:
        """[3] int64, of the last message: the parcel's digest, and its version."""
        assert self.data is not None and self.is_last
        return self.data[self.payload_bytes :].view(torch.int64)

    def staged(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """(place in a parameter, the same elements in the buffer) of each move, if it is staged."""
        start = 0
        for place in self.places if self.is_staged else ():
            end = start + place.numel() * dtype.itemsize
            yield place, self.payload[start:end].view(dtype).view(place.shape)
            start = end


def messages_of(
    parameters: dict[str, Tensor],
    parcel: Parcel,
    dtype: torch.dtype,
    *,
    is_sender: bool,
    stages_all: bool = False,
) -> list[Message]:
    """A parcel's messages at one end; those that are staged lack their buffers yet."""
    alone, together, size = [], [], 0
    for move in parcel.moves:
        place = _place(parameters, move, is_sender=is_sender)
        nbytes = move.size * dtype.itemsize
        if nbytes >= ALONE_BYTES and nbytes % _ALIGNMENT == 0:
            data = None if stages_all else _bytes_in_place(place, dtype)
            alone.append(Message([place], nbytes, data, is_staged=data is None))
        else:
            together.append(place)
            size += nbytes
    return [*alone, Message(together, _padded(size), is_last=True)]


def _place(parameters: dict[str, Tensor], move: Move, *, is_sender: bool) -> Tensor:
    name, row, column = move[2:5] if is_sender else move[5:8]
    return as_matrix(parameters[name])[row : row + move.rows, column : column + move.columns]


def _bytes_in_place(place: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A part of a parameter as the bytes of a message; None where it is no such run of bytes."""
    if place.dtype != dtype or not place.is_contiguous() or place.data_ptr() % _ALIGNMENT:
        return None
    return place.view(-1).view(torch.uint8)


def digest_in_place(messages: Iterable[Message]) -> None:
    """At a sender, ahead of `pack`: the digests of what is sent from where it lies."""
    for message in messages:
        if not message.is_staged:
            message.digest = digest(message.payload)


def pack(messages: Sequence[Message], dtype: torch.dtype, *, version: int) -> None:
    """Copy what is staged into the buffers, and write the trailer.

    Digests that are known already must be of what the parameters hold now.
    """
    last = messages[-1]
    # Its end is in no move.
    last.payload[-_ALIGNMENT:] = 0
    for message in messages:
        for place, held in message.staged(dtype):
            held.copy_(place)
    contents = [digest(m.payload) if m.digest is None else m.digest for m in messages]
    last.trailer[:WORDS] = fold(contents)
    last.trailer[WORDS] = version


def unpack(messages: Iterable[Message], dtype: torch.dtype, version: int) -> Tensor:
    """Copy what is staged to the parameters; whether the parcel is damaged, a bool on the device.

    messages: a parcel's; one that is yielded has arrived.
    """
    contents = []
    for message in messages:
        # At once, while the processor's cache still holds it.
        contents.append(digest(message.payload))
        for place, held in message.staged(dtype):
            place.copy_(held)
    assert contents and message.is_last
    is_whole = (fold(contents) == message.trailer[:WORDS]).all()
    return ~(is_whole & (message.trailer[WORDS] == version))


def give_back(messages: Iterable[Message]) -> None:
    """Keep no buffer: its memory may go."""
    for message in messages:
        if message.is_staged:
            message.data = None


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
