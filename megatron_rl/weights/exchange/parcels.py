"""Sending and receiving the parcels of a plan, round by round.

Shared by trainer ranks and engines; needs torch alone. Two rounds are in flight: a rank needs at
most twice the bytes of a round in addition to its parameters. Senders call `outgoing` before the
generator is paused, receivers `incoming` before the senders start: neither delays the transfer.
"""

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megatron_rl.weights.exchange.orders import Report
from megatron_rl.weights.exchange.packets import (
    digest_in_place,
    end_of,
    give_back,
    pack,
    unpack,
)
from megatron_rl.weights.exchange.plan import Rounds
from megatron_rl.weights.exchange.transport import Round, Transport, Wait


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


class StagedParameters(dict[str, Tensor]):
    """Parameters that have memory only while their slices arrive; before, on torch's device "meta".

    Those of an engine that quantises its weights: its codes are no place for slices. From `begin`
    to `finish` or `drop`, slices are copied into `parameters[name]`.
    """

    @abstractmethod
    def begin(self, elements: Mapping[str, int]) -> None:
        """A transfer begins.

        elements: how many it brings of each parameter. Padding is none of them.
        """

    @abstractmethod
    def arrived(self, name: str, elements: int) -> None:
        """So many more elements of the parameter have been copied. Raises RuntimeError."""

    @abstractmethod
    def finish(self) -> int:
        """The transfer is over; return the most bytes that were staged at once.

        Raises RuntimeError if a staged parameter is not complete.
        """

    @abstractmethod
    def drop(self) -> None:
        """The transfer failed, if there was one: free what is staged."""


Ends = Sequence[Round]
"""Of a rank's parcels, round by round."""


@torch.no_grad()
def outgoing(
    rounds: Rounds, parameters: dict[str, Tensor], dtype: torch.dtype, *, stages_all: bool = False
) -> Ends:
    """What a sender can do ahead: find what it sends, and take digests where it lies.

    The parameters must not change until all is sent. stages_all: see `Transport`.
    """
    find = partial(end_of, parameters, dtype=dtype, is_sender=True, stages_all=stages_all)
    ends = [[find(parcel) for parcel in parcels] for parcels in rounds]
    for end in chain.from_iterable(ends):
        digest_in_place(end.packets)
    return ends


@torch.no_grad()
def incoming(
    rounds: Rounds, parameters: dict[str, Tensor], dtype: torch.dtype, *, stages_all: bool = False
) -> Iterable[Round]:
    """What a receiver can do ahead: find where everything goes.

    Of parameters that are staged it finds a round's places, which takes their memory, only when
    `receive` asks for the round.
    """
    find = partial(end_of, parameters, dtype=dtype, is_sender=False, stages_all=stages_all)
    ends = ([find(parcel) for parcel in parcels] for parcels in rounds)
    if not isinstance(parameters, StagedParameters):
        return list(ends)
    elements: Counter[str] = Counter()
    for move in (move for parcels in rounds for parcel in parcels for move in parcel.moves):
        elements[move.target] += move.size
    parameters.begin(elements)
    return ends


def payload_bytes(ends: Iterable[Round], dtype: torch.dtype) -> int:
    """Of all parcels of a rank, without padding and digests."""
    moves = (move for parcels in ends for end in parcels for move in end.moves)
    return sum(move.size for move in moves) * dtype.itemsize


@torch.no_grad()
def send(ends: Ends, transport: Transport, *, dtype: torch.dtype, version: int) -> None:
    """Send a rank's parcels.

    Returns when everything has been handed over: the parameters may change from then on. Raises
    RuntimeError (torch's own) when a receiver is gone or does not take a round in time.
    """
    flying: list[tuple[Round, Wait]] = []
    # A round starts before the previous one is waited for. The empty one at the end waits for the
    # last. When a round takes its buffers, the last but one, which had them, has been waited for.
    for parcels in (*ends, ()):
        transport.lend(parcels)
        for end in parcels:
            pack(end.packets, dtype, version=version)
        flying.append((parcels, transport.send(parcels)))
        if len(flying) > 1:
            before, wait = flying.pop(0)
            wait()
            give_back(before)
    # In shared memory receivers may still read the last rounds.
    transport.finish()


@torch.no_grad()
def receive(
    ends: Iterable[Round],
    transport: Transport,
    *,
    dtype: torch.dtype,
    version: int,
    staged: StagedParameters | None = None,
) -> Report:
    """Receive a rank's parcels into its parameters, and hand them on to the next engine.

    ends: a round is asked for when those before the last one have been copied and handed on.
    staged: told what has been copied. Raises RuntimeError as `send` does.
    """
    started, size = time.monotonic(), 0
    damaged: list[Tensor] = []
    arrived: Round = ()
    # While one round is copied into the parameters and handed on, the next one is arriving. The
    # empty one at the end does so for the last.
    for parcels in chain(ends, [()]):
        size += payload_bytes([parcels], dtype)
        transport.lend(parcels)
        wait = transport.receive(parcels, arrived)
        damaged += [unpack(end.packets, dtype, version) for end in arrived]
        # Only after the copies into the parameters: the sender may overwrite its buffers now.
        transport.release(arrived)
        wait()
        give_back(arrived)
        if staged is not None:
            for move in (move for end in arrived for move in end.moves):
                staged.arrived(move.target, move.size)
        arrived = parcels
    transport.finish()
    return Report(
        # Only now: on a device each of these reads waits until all copies before it have ended.
        damaged=sum(int(each) for each in damaged),
        payload_bytes=transport.file_bytes or size,
        peak_bytes=transport.peak_bytes + (staged.finish() if staged is not None else 0),
        seconds=time.monotonic() - started,
    )
