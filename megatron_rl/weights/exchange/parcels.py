"""Sending and receiving the parcels of a plan, round by round.

Shared by trainer ranks and engines; needs torch alone. Two rounds are in flight: a rank needs at
most twice the bytes of a round in addition to its parameters. Senders call `outgoing` before the
generator is paused, receivers `incoming` before the senders start: neither delays the transfer.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.weights.exchange.group import Patience, Work, wait_until
from megatron_rl.weights.exchange.packets import (
    Packet,
    digest_in_place,
    give_back,
    pack,
    packets_of,
    unpack,
)
from megatron_rl.weights.exchange.plan import Parcel
from megatron_rl.weights.exchange.transport import Transport


class PlainParameters(dict[str, Tensor]):
    """Parameters by name: plain ones themselves, quantised ones dequantised when first asked for.

    A parameter that a library keeps quantised (TransformerEngine's Float8Tensor, with
    `expert.model.fp8_parameters`) claims the compute dtype. But `view(torch.uint8)` gives its codes
    without their scales, and any other view of a part dequantises the whole parameter.

    For one weight sync: what was dequantised is kept, so that it happens once for all slices and
    all generators. It takes as much memory as the quantised parameters in their nominal dtype.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        # Threads that prepare for engines of different kinds ask for the same ones.
        self._finding = threading.Lock()

    def __missing__(self, name: str) -> Tensor:
        with self._finding:
            if name not in self:
                parameter = self._parameters[name]
                self[name] = parameter.dequantize() if is_quantised(parameter) else parameter
        return self[name]


def is_quantised(parameter: Tensor) -> bool:
    """Whether its class keeps codes and knows how to dequantise them; torch's own do not."""
    return type(parameter).dequantize is not Tensor.dequantize


class ParcelEnd(NamedTuple):
    """A parcel as one end sees it; the packets that are staged lack their buffers yet."""

    peer: int
    packets: list[Packet]


Rounds = Sequence[Sequence[Parcel]]
Ends = Sequence[Sequence[ParcelEnd]]
"""Of a rank's parcels, round by round."""
Flight = tuple[list[Packet], list[Work]]
"""A parcel's packets on their way."""


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
def outgoing(
    rounds: Rounds, parameters: dict[str, Tensor], dtype: torch.dtype, *, stages_all: bool = False
) -> Ends:
    """What a sender can do ahead: find what it sends, and take digests where it lies.

    The parameters must not change until all is sent. stages_all: see `packets_of`.
    """
    ends = _ends(rounds, parameters, dtype, is_sender=True, stages_all=stages_all)
    for end in (end for parcels in ends for end in parcels):
        digest_in_place(end.packets)
    return ends


@torch.no_grad()
def incoming(
    rounds: Rounds, parameters: dict[str, Tensor], dtype: torch.dtype, *, stages_all: bool = False
) -> Ends:
    """What a receiver can do ahead: find where everything goes."""
    return _ends(rounds, parameters, dtype, is_sender=False, stages_all=stages_all)


def _ends(
    rounds: Rounds,
    parameters: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    is_sender: bool,
    stages_all: bool,
) -> Ends:
    def end_of(parcel: Parcel) -> ParcelEnd:
        packets = packets_of(parameters, parcel, dtype, is_sender=is_sender, stages_all=stages_all)
        return ParcelEnd(parcel.receiver if is_sender else parcel.sender, packets)

    return [[end_of(parcel) for parcel in parcels] for parcels in rounds]


def payload_bytes(ends: Ends, dtype: torch.dtype) -> int:
    """Of all parcels of a rank, without padding and digests."""
    packets = (packet for parcels in ends for end in parcels for packet in end.packets)
    return sum(packet.elements for packet in packets) * dtype.itemsize


@torch.no_grad()
def send(
    ends: Ends, transport: Transport, *, dtype: torch.dtype, version: int, patience: Patience
) -> int:
    """Send a rank's parcels; returns the most bytes of buffers at once.

    Returns when everything has been handed over: the parameters may change from then on. Raises
    RuntimeError (torch's own) when a receiver is gone or does not take a round in time.
    """
    flying: list[Flight] = []
    # A round starts before the previous one is waited for. The empty one at the end waits for the
    # last. When a round takes its buffers, the last but one, which had them, has been waited for.
    for parcels in (*ends, ()):
        held = [end.packets for end in parcels]
        transport.lend(held, patience, is_sender=True)
        for packets in held:
            pack(packets, dtype, version=version)
        works = transport.send([end.peer for end in parcels], held)
        for packets, each in flying:
            _wait(each, patience)
            give_back(packets)
        flying = list(zip(held, works, strict=True))
    # In shared memory receivers may still read the last rounds.
    transport.finish(patience)
    return transport.peak_bytes


@torch.no_grad()
def receive(
    ends: Iterable[Sequence[ParcelEnd]],
    transport: Transport,
    *,
    dtype: torch.dtype,
    version: int,
    patience: Patience,
) -> Received:
    """Receive a rank's parcels into its parameters, and hand them on to the next engine.

    ends: a round is asked for when those before the last one have been copied and handed on. Raises
    RuntimeError as `send` does.
    """
    result = Received()
    started = time.monotonic()
    damaged: list[Tensor] = []
    arrived: list[list[Packet]] = []
    arrived_from: list[int] = []
    # While one round is copied into the parameters and handed on, the next one is arriving. The
    # empty one at the end does so for the last.
    for parcels in chain(ends, [()]):
        result.payload_bytes += payload_bytes([parcels], dtype)
        held, senders = [end.packets for end in parcels], [end.peer for end in parcels]
        transport.lend(held, patience, is_sender=False)
        works, onward = transport.receive(senders, held, arrived)
        damaged += [unpack(packets, dtype, version) for packets in arrived]
        # Only after the copies into the parameters: the sender may overwrite its buffers now.
        transport.release(arrived_from)
        for each in (*works, onward):
            _wait(each, patience)
        for packets in arrived:
            give_back(packets)
        arrived, arrived_from = held, senders
    # Only now: on a device each of these reads waits until all copies before it have ended.
    result.damaged = sum(int(each) for each in damaged)
    result.peak_bytes = transport.peak_bytes
    result.seconds = time.monotonic() - started
    return result


def _wait(flying: Sequence[Work], patience: Patience) -> None:
    for work in flying:
        wait_until(work, patience.ends_at())
