"""What the ranks of a weight sync tell each other in the key-value store of trainer rank 0.

| key | set by | says |
|---|---|---|
| `layouts/N` | rank 0 | `Layouts`, from which every rank computes the plan |
| `prepared/N/RANK` | trainer rank | "" when it waits for call N, else why it cannot send |
| `ready/N/REPLICA/RANK` | engine rank | `Ready`: whether it can receive, and what it holds |
| `go/N` | rank 0 | a `Call`: a transfer, or none, or the end of the weight sync |
| `failed/N` | any rank that fails in that transfer | why; the last one's reason stays |
| `done/N/REPLICA/RANK` | engine rank | a `Report` |

N counts layouts in the first row, and calls (attempts) in the others.
"""

import msgspec


def key(kind: str, number: int, *of: str | int) -> str:
    """See the module's table."""
    return "/".join(map(str, (kind, number, *of)))


class Call(msgspec.Struct, frozen=True):
    """What rank 0 tells all ranks of a transfer; or, without replicas, that there is none."""

    attempt: int
    version: int = -1
    layouts: int = 0
    """Number of the layouts in the store."""
    group: str = ""
    """Prefix of the lanes' names. The same name, the same groups."""
    replicas: tuple[str, ...] = ()
    """Generators that take part, in the order in which they hand the packets on."""
    left_s: float = 0.0
    """Until the transfer's deadline."""
    wait_s: float = 0.0
    """Most that a rank waits for one round of packets."""
    base: int = -1
    """With FOLDER: version that most of them hold, to which a difference may be added; -1: none."""
    needs_whole: bool = True
    """Whether some of them do not hold it."""
    keeps: bool = False
    """Whether senders keep what they send, for the next difference."""
    is_end: bool = False
    """The weight sync is over."""


class Ready(msgspec.Struct, frozen=True):
    """What one engine rank says before a transfer."""

    error: str = ""
    """Why it cannot receive; empty: it can."""
    holds: int = -1
    """Version that its parameters hold bit for bit; -1: none, or not in the type on the wire."""


class Report(msgspec.Struct, frozen=True):
    """What one engine rank says of one transfer."""

    error: str = ""
    """Empty when every parcel arrived, damaged or not."""
    damaged: int = 0
    """Parcels whose digest or version is not that of their content."""
    payload_bytes: int = 0
    """That arrived, without padding and digests; with FOLDER, of the files."""
    peak_bytes: int = 0
    """Most bytes of buffers, and of layers that were staged, at once."""
    seconds: float = 0.0
