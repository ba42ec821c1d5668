"""Sending and receiving the parcels of a plan, round by round.

Shared by trainer ranks and engines; needs torch alone. Two rounds are in flight: a rank needs at
most twice the bytes of a round beside its parameters.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from megatron_rl.weights.messages import Message, messages_of, pack, unpack
from megatron_rl.weights.reshard import Parcel
from megatron_rl.weights.transport import Transport, Work


@dataclass
class Received:
    """What a receiver reports."""

    payload_bytes: int = 0
    peak_bytes: int = 0
    """Most bytes of buffers at once."""
    seconds: float = 0.0
    damaged: int = 0
    """Parcels whose digest or version is not that of their content."""


@torch.no_grad()
def send(
    rounds: Sequence[Sequence[Parcel]],
    parameters: dict[str, Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> int:
    """Send a rank's parcels; returns the most bytes of buffers at once.

    Returns when everything has been handed over: the parameters may change from then on. Raises
    RuntimeError (torch's own) when a receiver is gone or at `ends_at` (monotonic time).
    """
    flying: list[Work] = []
    for parcels in rounds:
        held = [
            messages_of(parameters, parcel, dtype, is_sender=True, stages_all=transport.stages_all)
            for parcel in parcels
        ]
        transport.lend(held, ends_at, is_sender=True)
        for messages in held:
            pack(messages, dtype, version=version)
        works = transport.send([parcel.receiver for parcel in parcels], held)
        _wait(flying, ends_at)
        flying = [work for each in works for work in each]
    _wait(flying, ends_at)
    transport.finish(ends_at)
    return transport.peak_bytes


@torch.no_grad()
def receive(
    rounds: Sequence[Sequence[Parcel]],
    parameters: dict[str, Tensor],
    transport: Transport,
    *,
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> Received:
    """Receive a rank's parcels into its parameters. Raises RuntimeError as `send` does."""
    started = time.monotonic()
    device = next(iter(parameters.values())).device
    result = Received()
    damaged = torch.zeros((), dtype=torch.int64, device=device)
    arriving: list[tuple[list[Message], list[Work]]] = []
    arriving_from: list[int] = []
    for parcels in (*rounds, ()):
        held = [
            messages_of(parameters, parcel, dtype, is_sender=False, stages_all=transport.stages_all)
            for parcel in parcels
        ]
        transport.lend(held, ends_at, is_sender=False)
        senders = [parcel.sender for parcel in parcels]
        works = transport.receive(senders, held)
        damaged += _unpack_all(arriving, dtype, version, ends_at)
        transport.release(arriving_from)
        result.payload_bytes += sum(parcel.size for parcel in parcels) * dtype.itemsize
        arriving, arriving_from = list(zip(held, works, strict=True)), senders
    result.damaged = int(damaged)
    result.peak_bytes = transport.peak_bytes
    result.seconds = time.monotonic() - started
    return result


def _unpack_all(
    arriving: Sequence[tuple[list[Message], list[Work]]],
    dtype: torch.dtype,
    version: int,
    ends_at: float,
) -> Tensor | int:
    """How many are damaged. A loop in the caller would keep its last buffers for another round."""
    return sum(unpack(_arrived(held, works, ends_at), dtype, version) for held, works in arriving)


def _arrived(
    messages: Sequence[Message], works: Sequence[Work], ends_at: float
) -> Iterator[Message]:
    for message, work in zip(messages, works, strict=True):
        _wait([work], ends_at)
        yield message


def _wait(flying: Sequence[Work], ends_at: float) -> None:
    for work in flying:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise RuntimeError("the exchange of weights passed its deadline")
        work.wait(timedelta(seconds=left_s))
