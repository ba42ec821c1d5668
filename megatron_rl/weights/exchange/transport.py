"""How packets get from trainer ranks to engine ranks: what all ways have in common.

Shared by trainer ranks and engines; needs torch and messages alone. The ways: process groups
(`group_transport.py`), memory that both ends share (`shared_transport.py`), and files
(`folder_transport.py`). Two rounds are in flight, whose buffers lie in two spaces that are used in
turn.
"""

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.weights.exchange.orders import Call
from megatron_rl.weights.exchange.packets import Packet, ParcelEnd
from megatron_rl.weights.exchange.plan import Plan

IPC = "ipc"
"""In the place of a collective backend: shared memory."""
FOLDER = "folder"
"""In its place: files in a folder. No kernel waits for another rank."""
Round = Sequence[ParcelEnd]
Wait = Callable[[], None]
"""Returns when what was started is over. Raises RuntimeError (torch's own) when it fails or takes
longer than the call allows."""


class Transport:
    """One rank's end of all transfers. Peers are ranks of the plan."""

    stages_all = False
    """Whether packets never lie in the parameters themselves; the same at both ends."""

    def __init__(self, store: dist.Store, rank: int, device: torch.device) -> None:
        """rank: in the plan. device: of the parameters."""
        self._store, self._rank, self._device = store, rank, device
        self._halves: list[Tensor | None] = [None, None]
        """[bytes] uint8. Kept from one transfer to the next, which would otherwise spend a tenth of
        its time on getting memory; at most twice the bytes of a round."""
        self._half = 0
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self.peak_bytes = 0
        """Most bytes of buffers at once."""
        self.file_bytes = 0
        """Bytes of files that a receiver has read in this transfer."""

    def begin(self, call: Call, plan: Plan, *, replica: str = "", holds: int = -1) -> None:
        """A transfer begins; its waits have the call's limits from now on. Raises RuntimeError.

        replica: of an engine rank. holds: version that its parameters hold, to which a difference
        may be added; -1: none.
        """
        self._call, self._replica = call, replica
        self._deadline = time.monotonic() + call.left_s
        self._counts.clear()

    def lend(self, parcels: Round) -> None:
        """Give the staged packets of the next round their buffers.

        They lie in the space of the last but one round, which has been waited for by now.
        """
        self._half = 1 - self._half
        packets = [packet for end in parcels for packet in end.packets if packet.is_staged]
        size, held = sum(packet.nbytes for packet in packets), self._halves[self._half]
        if packets and (held is None or held.nbytes < size):
            # Let the old memory go first: both at once would be three spaces.
            held = self._halves[self._half] = None
            held = self._halves[self._half] = self._allocate(size)
            lent = sum(half.nbytes for half in self._halves if half is not None)
            self.peak_bytes = max(self.peak_bytes, lent)
        if held is not None:
            deal(packets, held)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    @abstractmethod
    def send(self, parcels: Round) -> Wait:
        """Start to send a round."""

    @abstractmethod
    def receive(self, parcels: Round, onward: Round) -> Wait:
        """Start to receive a round, and to hand the one before on to the next engine."""

    def release(self, parcels: Round) -> None:
        """A receiver needs the bytes of these parcels, the oldest ones, no longer.

        Called when their content is in the parameters. Senders whose buffers the receiver reads may
        fill them anew from then on.
        """

    def finish(self) -> None:
        """The last round is over: wait until this end's buffers are needed no more."""

    def forget(self, replicas: Iterable[str]) -> None:
        """Leave all groups with these generators. Peers that wait for this rank there fail."""

    def close(self) -> None:
        """Leave all groups, and let go of what the last transfer has left."""

    def ends_at(self) -> float:
        """By when a wait that begins now must be over, as monotonic time."""
        return min(self._deadline, time.monotonic() + self._call.wait_s)

    def left(self) -> timedelta:
        """How long a wait that begins now may last. Raises RuntimeError at the deadline."""
        left_s = self.ends_at() - time.monotonic()
        # torch takes a timeout of 0 for the group's default, which may be much longer.
        if left_s <= 0:
            raise RuntimeError("the exchange of weights passed its deadline")
        return timedelta(seconds=left_s)

    def _next_key(self, kind: str, sender: int, receiver: int) -> str:
        """Key of the store about the sender's next parcel to the receiver."""
        number = self._counts[kind, sender, receiver]
        self._counts[kind, sender, receiver] += 1
        return f"{kind}/{self._call.attempt}/{sender}/{receiver}/{number}"


def deal(packets: Iterable[Packet], memory: Tensor) -> None:
    """Give the packets their bytes, one after the other."""
    start = 0
    for packet in packets:
        packet.data = memory[start : start + packet.nbytes]
        start += packet.nbytes
