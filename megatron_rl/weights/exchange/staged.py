"""Receiving into parameters that have memory only while their slices arrive.

Runs in every rank of an engine that quantises its weights: its codes are no place for slices. The
transfer is that of any other engine.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from megatron_rl.weights.exchange.parcels import ParcelEnd, Rounds, incoming
from megatron_rl.weights.exchange.plan import Parcel

_IN_FLIGHT = 2
"""Rounds that `parcels.receive` has asked for and not yet copied."""


class StagedParameters(dict[str, Tensor]):
    """Parameters by name, as slices see them; the staged ones are on torch's device "meta".

    From `begin` to `finish` or `drop`, slices are copied into `parameters[name]`.
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


class StagedRounds:
    """A rank's rounds for `parcels.receive`, each made when it is asked for."""

    def __init__(
        self,
        rounds: Rounds,
        parameters: StagedParameters,
        dtype: torch.dtype,
        *,
        stages_all: bool,
    ) -> None:
        """The arguments are those of `parcels.incoming`."""
        self._rounds, self._parameters = rounds, parameters
        self._dtype, self._stages_all = dtype, stages_all
        parameters.begin(elements_of(chain.from_iterable(rounds)))

    def __iter__(self) -> Iterator[Sequence[ParcelEnd]]:
        for number, parcels in enumerate(self._rounds):
            if number >= _IN_FLIGHT:
                self._tell([self._rounds[number - _IN_FLIGHT]])
            (ends,) = incoming(
                [parcels], self._parameters, self._dtype, stages_all=self._stages_all
            )
            yield ends

    def finish(self) -> int:
        """All rounds have been received; return the most bytes that were staged at once."""
        self._tell(self._rounds[-_IN_FLIGHT:])
        return self._parameters.finish()

    def _tell(self, rounds: Rounds) -> None:
        for name, elements in elements_of(chain.from_iterable(rounds)).items():
            self._parameters.arrived(name, elements)


def elements_of(parcels: Iterator[Parcel]) -> Counter[str]:
    """How many elements parcels bring of each parameter."""
    found: Counter[str] = Counter()
    for parcel in parcels:
        for move in parcel.moves:
            found[move.target] += move.size
    return found
