"""Messages of the weights endpoint: trainer rank 0 (ROUTER) <-> generators (DEALER).

Imported by every process, mostly through `types.py`. docs/weights.md describes their order.
"""

import msgspec

from megatron_rl.protocol.limits import Count, Name, Port, Seconds, Size, Version


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """A generator asks to receive weights; its engine has `world_size` ranks."""

    world_size: Size
    engine: Name
    engine_version: Name
    session: int = 0
    """Grows when the generator restarts."""
    ffn_multiple: Size = 1
    """The engine pads the MLP units of a rank to a multiple of this."""
    expert_parallel: Size = 1
    """Number of engine ranks that share the experts, with each expert whole on one rank."""
    version: Version = -1
    """Its policy version; -1: none, so it needs a whole weight sync."""
    is_held: bool = False
    """It keeps that version for now: skip it."""
    is_paused: bool = False
    """Its engine waits for Resume, and may hold a part of a later version."""
    nccl: dict[str, str] = {}
    """Its NCCL variables that must equal the trainer's."""
    is_leaving: bool = False
    """It leaves the run: no further weight sync waits for it."""


class StartRequest(msgspec.Struct, frozen=True, tag="StartRequest"):
    """A colocated generator asks whether the GPU has room for its engine."""

    session: int
    """The session of its later Hello."""


class MayStart(msgspec.Struct, frozen=True, tag="MayStart"):
    """The GPU has room, until Release."""


class Receive(msgspec.Struct, frozen=True, tag="Receive"):
    """Take part in a transfer of slices; see `weights/exchange/engine_rank.py`."""

    address: str
    port: Port
    """Port of the syncer's store."""
    syncer: str
    """Name of the syncer: versions begin anew with another one."""
    replica: Name
    """Name of the generator."""
    layouts: Count
    """Number of the layouts in the store, from which the rank computes its plan."""
    backend: str
    attempt: Count
    """Number of the transfer."""
    version: Count
    deadline_s: Seconds
    folder: str = ""
    """Path or URL of `expert.weights.folder`, with the backend "folder"."""


class Fence(msgspec.Struct, frozen=True, tag="Fence"):
    """Serve nothing until a weight sync succeeds: the weights are incomplete or damaged."""

    reason: str


class Ping(msgspec.Struct, frozen=True, tag="Ping"):
    """No order, no answer: sending it fails if the generator is gone."""


class Pause(msgspec.Struct, frozen=True, tag="Pause"):
    """Stop between two tokens; keep requests and KV cache."""


class Release(msgspec.Struct, frozen=True, tag="Release"):
    """Stop, requeue requests, and free the memory of weights and KV cache until Reclaim."""


class Reclaim(msgspec.Struct, frozen=True, tag="Reclaim"):
    """Allocate the memory again, if freed; the next weight sync brings weights."""


class Resume(msgspec.Struct, frozen=True, tag="Resume"):
    """Continue; later tokens carry `version`."""

    version: Count


class LeaveGroup(msgspec.Struct, frozen=True, tag="LeaveGroup"):
    """Leave the weight group; another syncer may open a new one."""


class Ack(msgspec.Struct, frozen=True, tag="Ack"):
    """The generator obeyed the message named `done`."""

    done: Name


class Failed(msgspec.Struct, frozen=True, tag="Failed"):
    """The generator could not obey the message named `doing`."""

    doing: Name
    reason: str
