"""The product's transports in a rehearsed rank: ranks have the numbers of their traces.

The ends of shared memory wait for each other by keys of a store. Traces have these waits as sends
and receives: of a parcel's bytes, and of none when the receiver has taken them. The other end sets
its key when it is waited for.
"""

from functools import partial
from itertools import product

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.config.tree import Config
from megatron_rl.rehearsal.collectives import group_name
from megatron_rl.rehearsal.device import DEVICE
from megatron_rl.rehearsal.tracer import Tracer
from megatron_rl.weights.exchange import group_transport
from megatron_rl.weights.exchange.group_transport import GroupTransport, Lane
from megatron_rl.weights.exchange.memory import Handle, SharedMemory
from megatron_rl.weights.exchange.packets import ParcelEnd
from megatron_rl.weights.exchange.shared_transport import Location, SharedTransport
from megatron_rl.weights.exchange.transport import Round, Wait


def engine_name(number: int) -> str:
    """Of a generator. The order of names is that in which engines hand on."""
    return f"engine-{number:06}"


def install(cfg: Config, tracer: Tracer) -> None:
    """For all transports that this process opens."""
    # For one parcel, and for a larger one of a faulty rank.
    lent = Handle(2 * cfg.weights.bucket_bytes)
    note = partial(tracer.issued, "SHARED_MEMORY", [], dtype="uint8")

    def number(receiver: int, replica: str) -> int:
        """As in Trace.rank. receiver: the plan's number of the engine rank."""
        return receiver + int(replica.rpartition("-")[2]) * cfg.generator.tensor_parallel

    class NumberedLanes(GroupTransport):
        def _members(self, receiver: int, roots: tuple[int, ...], engine_ranks: int) -> list[int]:
            return [*roots, *(number(receiver, each) for each in self._call.replicas)]

        def _meet(self, lane: Lane) -> None:
            # No rank has a communicator of NCCL before all ranks have come.
            ranks = dist.get_process_group_ranks(lane.group)
            tracer.issued(group_name(lane.group), ranks, kind="connect", bytes=0, dtype="")
            super()._meet(lane)

    class TracedMemory(SharedTransport):
        def send(self, parcels: Round) -> Wait:
            for end, replica in product(parcels, self._call.replicas):
                note(kind="send", peer=number(end.peer, replica), bytes=end.nbytes)
            return super().send(parcels)

        def _await_one(self, receiver: int, replica: str, taken: str, ends_at: float) -> None:
            note(kind="recv", peer=number(receiver, replica), bytes=0)
            self._store.set(f"{taken}/{replica}", b"")
            super()._await_one(receiver, replica, taken, ends_at)

        def _arrive(self, full: str, end: ParcelEnd) -> None:
            note(kind="recv", peer=end.peer, bytes=end.nbytes)
            self._opened[lent] = torch.empty(lent.size, dtype=torch.uint8, device=DEVICE)
            self._store.set(full, msgspec.json.encode(Location(lent, 0)))
            super()._arrive(full, end)

        def release(self, parcels: Round) -> None:
            super().release(parcels)
            for end in parcels:
                note(kind="send", peer=end.peer, bytes=0)

    group_transport.GroupTransport = NumberedLanes
    group_transport.SharedTransport = TracedMemory
    SharedMemory.handle = lambda memory: Handle(memory.tensor.numel())
