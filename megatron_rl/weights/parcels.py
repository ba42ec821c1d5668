"""Sending and receiving the parcels of a plan, with their digests.

Shared by trainer ranks and engines; needs torch alone. A parcel travels in messages:

| message | holds | where it is sent from and received into |
|---|---|---|
| one for each move of at least ALONE_BYTES | its elements | the parameter, if it is one run there |
| the last | the other moves' elements, then the parcel's digest and version | a buffer |

Both ends know the messages from the plan; whether a large move needs a buffer, each end sees for
itself. Two rounds are in flight, whose buffers lie in two spaces that are used in turn: a rank
needs at most twice the bytes of a round beside its parameters.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.reshard import Move, Parcel
from megatron_rl.weights.slices import as_matrix

DIGEST_WORDS = 2
TRAILER_BYTES = 8 * (DIGEST_WORDS + 1)
ALONE_BYTES = 256 << 10
"""A message of its own costs less than copying so much."""
_BLOCK_WORDS = 4096
_PLACE = 0x9E3779B1
"""Odd and above any count of blocks: no two words have the same weight."""
_ALIGNMENT = 8


@dataclass
class Received:
    """What a receiver reports."""

    payload_bytes: int = 0
    peak_bytes: int = 0
    """Most bytes of buffers at once."""
    seconds: float = 0.0
    damaged: int = 0
    """Parcels whose digest or version is not that of their content."""


class Digest:
    """Digest of payloads whose lengths are multiples of 8, taken in one after the other.

    The sum of their 64-bit words, and the same weighted by their block and their place in it; both
    modulo 2^64. Any change of a single word changes the first, exchanged words change the second.
    """

    def __init__(self, device: torch.device) -> None:
        self._by_block: list[Tensor] = []
        self._by_place = torch.zeros(_BLOCK_WORDS, dtype=torch.int64, device=device)

    def add(self, payload: Tensor) -> None:
        """Take in [bytes] uint8. The last block of a payload may be short."""
        words = payload.view(torch.int64)
        whole = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
        if whole:
            blocks = words[:whole].view(-1, _BLOCK_WORDS)
            self._by_block.append(blocks.sum(1))
            self._by_place += blocks.sum(0)
        rest = words[whole:]
        self._by_block.append(rest.sum().unsqueeze(0))
        self._by_place[: rest.numel()] += rest

    def words(self) -> Tensor:
        """[2] int64, on the device of the payloads."""
        by_block = torch.cat(self._by_block)
        weighted = _weighted(by_block) + _PLACE * _weighted(self._by_place)
        return torch.stack([by_block.sum(), weighted])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(sums.numel(), device=sums.device)).sum()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """A group's first collective. All ranks must take part in it, but not all do in a round."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def buffer_bytes(parcel: Parcel, dtype: torch.dtype) -> int:
    """Bytes of a parcel's messages together."""
    return _padded(parcel.size * dtype.itemsize) + TRAILER_BYTES


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
    parameters: dict[str, Tensor], parcel: Parcel, dtype: torch.dtype, *, is_sender: bool
) -> list[Message]:
    """A parcel's messages at one end; those that are staged lack their buffers yet."""
    alone, together, size = [], [], 0
    for move in parcel.moves:
        place = _place(parameters, move, is_sender=is_sender)
        nbytes = move.size * dtype.itemsize
        if nbytes >= ALONE_BYTES and nbytes % _ALIGNMENT == 0:
            data = _bytes_in_place(place, dtype)
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


def pack(messages: Sequence[Message], dtype: torch.dtype, *, version: int) -> None:
    """Copy what is staged into the buffers, and write the trailer."""
    last = messages[-1]
    content = Digest(last.trailer.device)
    # Its end is in no move.
    last.payload[-_ALIGNMENT:] = 0
    for message in messages:
        for place, held in message.staged(dtype):
            held.copy_(place)
        content.add(message.payload)
    last.trailer[:DIGEST_WORDS] = content.words()
    last.trailer[DIGEST_WORDS] = version


def unpack(messages: Iterable[Message], dtype: torch.dtype, version: int) -> Tensor:
    """Copy what is staged to the parameters; whether the parcel is damaged, a bool on the device.

    messages: a parcel's; one that is yielded has arrived.
    """
    content: Digest | None = None
    for message in messages:
        content = content or Digest(message.payload.device)
        # At once, while the processor's cache still holds it.
        content.add(message.payload)
        for place, held in message.staged(dtype):
            place.copy_(held)
    assert content is not None and message.is_last
    is_whole = (content.words() == message.trailer[:DIGEST_WORDS]).all()
    return ~(is_whole & (message.trailer[DIGEST_WORDS] == version))


class Space:
    """Memory for the buffers of two rounds in flight, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._halves = [_bytes(0, device) for _ in range(2)]
        self.peak_bytes = 0

    def lend(self, number: int, parcels: Sequence[Sequence[Message]]) -> None:
        """Give the messages of round `number` their buffers, where the last but one's were."""
        staged = [message for parcel in parcels for message in parcel if message.is_staged]
        sizes = [message.nbytes for message in staged]
        half = number % 2
        if self._halves[half].nbytes < sum(sizes):
            # The old memory goes before the new one comes.
            self._halves[half] = _bytes(0, self._device)
            self._halves[half] = _bytes(sum(sizes), self._device)
            self.peak_bytes = max(self.peak_bytes, sum(each.nbytes for each in self._halves))
        start = 0
        for message, size in zip(staged, sizes, strict=True):
            message.data = self._halves[half][start : start + size]
            start += size


@torch.no_grad()
def send(
    rounds: Sequence[Sequence[Parcel]],
    parameters: dict[str, Tensor],
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    version: int,
    deadline_s: float,
) -> int:
    """Send a rank's parcels; returns the most bytes of buffers at once.

    Returns when everything has been handed over: the parameters may change from then on. Raises
    RuntimeError (torch's own) when a receiver is gone or `deadline_s` from now has passed.
    """
    ends_at = time.monotonic() + deadline_s
    space = Space(_device(parameters))
    flying: list[dist.Work] = []
    for number, parcels in enumerate(rounds):
        held = [messages_of(parameters, parcel, dtype, is_sender=True) for parcel in parcels]
        space.lend(number, held)
        for messages in held:
            pack(messages, dtype, version=version)
        peers = [parcel.receiver for parcel in parcels]
        works = _start(dist.isend, peers, held, group)
        _wait(flying, ends_at)
        flying = [work for each in works for work in each]
    _wait(flying, ends_at)
    return space.peak_bytes


@torch.no_grad()
def receive(
    rounds: Sequence[Sequence[Parcel]],
    parameters: dict[str, Tensor],
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    version: int,
    deadline_s: float,
) -> Received:
    """Receive a rank's parcels into its parameters. Raises RuntimeError as `send` does."""
    started = time.monotonic()
    ends_at = started + deadline_s
    space = Space(_device(parameters))
    result = Received()
    damaged = torch.zeros((), dtype=torch.int64, device=_device(parameters))
    arriving: list[tuple[list[Message], list[dist.Work]]] = []
    for number, parcels in enumerate((*rounds, ())):
        held = [messages_of(parameters, parcel, dtype, is_sender=False) for parcel in parcels]
        space.lend(number, held)
        works = _start(dist.irecv, [parcel.sender for parcel in parcels], held, group)
        damaged += _unpack_all(arriving, dtype, version, ends_at)
        result.payload_bytes += sum(parcel.size for parcel in parcels) * dtype.itemsize
        arriving = list(zip(held, works, strict=True))
    result.damaged = int(damaged)
    result.peak_bytes = space.peak_bytes
    result.seconds = time.monotonic() - started
    return result


def _unpack_all(
    arriving: Sequence[tuple[list[Message], list[dist.Work]]],
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> Tensor | int:
    """How many are damaged. A loop in the caller would keep its last buffers for another round."""
    return sum(unpack(_arrived(held, works, ends_at), dtype, version) for held, works in arriving)


def _arrived(
    messages: Sequence[Message], works: Sequence[dist.Work], ends_at: float
) -> Iterator[Message]:
    for message, work in zip(messages, works, strict=True):
        _wait([work], ends_at)
        yield message


def _device(parameters: dict[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


def _start(
    operation: Callable[..., object],
    peers: Sequence[int],
    parcels: Sequence[Sequence[Message]],
    group: dist.ProcessGroup,
) -> list[list[dist.Work]]:
    """One work for each message of each parcel, also where the backend makes one of all."""
    ops = [
        dist.P2POp(operation, message.data, group=group, group_peer=peer)
        for peer, messages in zip(peers, parcels, strict=True)
        for message in messages
    ]
    works = dist.batch_isend_irecv(ops) if ops else []
    each = iter(works if len(works) == len(ops) else works * len(ops))
    return [[next(each) for _ in messages] for messages in parcels]


def _wait(flying: Sequence[dist.Work], ends_at: float) -> None:
    for work in flying:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise RuntimeError("the exchange of weights passed its deadline")
        work.wait(timedelta(seconds=left_s))


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
