"""What a rank is asked to rehearse, and what it leaves: collectives, host reads, memory, FLOPs."""

from collections import Counter
from pathlib import Path

import msgspec

REQUEST = "request.json"
PASSES = "passes"
"""Phase of the forward and backward passes of a step's microbatches."""
SYNC = "weight sync"
"""Phase of the weight sync before the step."""
Stack = tuple[str, ...]
"""FILE:LINE FUNCTION, the innermost call first."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A collective, a send or a receive, as a rank issued it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, barrier, send, recv, ..."""
    group: str
    """Name of the group: its description and its ranks."""
    bytes: int
    """Bytes that the rank gives; of a receive and a barrier, those that it gets."""
    dtype: str
    detail: str = ""
    """The root of a broadcast: equal on all ranks of the group."""
    peer: int = -1
    """Rank at the other end of a send or a receive."""
    batch: int = 0
    """Number of the batch that issued it with others at once; 0: alone."""
    waited: int = 0
    """Of a send or receive outside a batch: place of the first event after the rank's wait for it.
    0: the rank waits at the end."""
    phase: str = ""
    flops: int = 0
    """That the rank has computed in the step before it."""
    stack: int = 0
    """Place in Trace.stacks."""


class HostRead(msgspec.Struct, frozen=True):
    """A place where the host waits for the device, to read a value."""

    phase: str
    stack: int
    is_own: bool
    """Whether code outside of installed packages reads."""
    count: int


class Trace(msgspec.Struct):
    """One rank's weight sync and step."""

    rank: int
    """Of the trainer. The ranks of its engines have the numbers after them, engine by engine."""
    name: str
    groups: dict[str, list[int]]
    events: list[Event]
    stacks: list[Stack]
    reads: list[HostRead]
    peak_bytes: int
    """Largest sum of the device's tensors."""
    peaks: dict[str, int]
    """The same of each phase."""
    peak_parts: dict[str, int]
    """The tensors of the largest sum, by purpose."""
    host_bytes: int
    """Largest sum of pinned memory and an offloaded optimizer's, since the rank's start."""
    copied_bytes: dict[str, int]
    """Between host and device: "to host", "to device"."""
    flops: int
    kernels: dict[str, int]
    """Operations that read or write data, by phase."""
    microbatches: int | None
    """None: of an engine rank."""
    parameters: int
    seconds: float

    def stack_of(self, event: "Event | HostRead") -> Stack:
        """Where it was issued."""
        return self.stacks[event.stack]

    def calls(self, *, is_sync: bool) -> int:
        """Number of events of the weight sync, or of the step."""
        return sum((event.phase == SYNC) == is_sync for event in self.events)

    def bytes_by_group(self) -> Counter[str]:
        """Bytes that this rank gives, by the description of the group."""
        found: Counter[str] = Counter()
        for event in self.events:
            if event.kind != "recv":
                found[event.group.partition(" ")[0]] += event.bytes
        return found


class Request(msgspec.Struct):
    """What to rehearse."""

    config: str
    """File with the whole configuration."""
    ranks: list[int]
    """Of the trainer."""
    engine_ranks: list[int]
    """Numbers as in Trace.rank; []: no weight sync."""
    microbatches: int
    tokens: int
    sequence_tokens: int
    processes: int
    limit_s: float
    """Of one rank."""


def write_trace(folder: Path, trace: Trace) -> None:
    """As FOLDER/RANK.json."""
    (folder / f"{trace.rank}.json").write_bytes(msgspec.json.encode(trace))


def read_trace(folder: Path, rank: int) -> Trace:
    """As `write_trace` wrote it."""
    return msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=Trace)
