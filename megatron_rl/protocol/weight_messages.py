"""Messages of the weights endpoint: trainer rank 0 (ROUTER) <-> generators (DEALER).

Imported by every process, mostly by way of `types.py`. docs/weights.md says who sends which when.
"""

import msgspec


class Hello(msgspec.Struct, frozen=True, tag="Hello"):
    """A generator asks to receive weights; its engine has `world_size` ranks."""

    world_size: int
    engine: str
    engine_version: str
    session: int = 0
    """Grows when the generator restarts."""
    ffn_multiple: int = 1
    """To what the engine pads the MLP units of a rank."""
    expert_parallel: int = 1
    """Number of the engine's ranks that share the experts, each expert whole on one rank."""
    version: int = -1
    """Policy version that it serves; -1: none, it needs a whole weight sync."""
    is_held: bool = False
    """It keeps that version for now: skip it."""
    nccl: dict[str, str] = {}
    """Its values of the variables that ranks of one communicator must agree on."""


class StartRequest(msgspec.Struct, frozen=True, tag="StartRequest"):
    """A generator asks whether there is room on the trainer's GPU for its engine."""

    session: int
    """That of its Hello, later."""


class MayStart(msgspec.Struct, frozen=True, tag="MayStart"):
    """There is, until the engine is told to give its memory back."""


class Receive(msgspec.Struct, frozen=True, tag="Receive"):
    """Take parcels from the trainer ranks 0..rank_offset-1; see `exchange/engine_rank.py`."""

    address: str
    port: int
    """Of the exchange's store, which holds the plan."""
    group_name: str
    backend: str
    rank_offset: int
    world_size: int
    attempt: int
    """Counts the transfers of a group."""
    version: int
    deadline_s: float


class PassOn(msgspec.Struct, frozen=True, tag="PassOn"):
    """Send the version that was just received to another engine; see `weights/relay.py`.

    Answered when rank 0 has said in the exchange's store that it is over.
    """

    address: str
    port: int
    """Of the exchange's store with the other engine, which says what each rank gives."""
    group_name: str
    version: int
    deadline_s: float
    """Of a transfer."""
    kept: list[str] = []
    """Groups with other engines that are still in use; all further ones are left."""

    @property
    def limit_s(self) -> float:
        """It is over by then: the other engine makes ready and takes two transfers at most."""
        return 3 * self.deadline_s + 10.0


class Load(msgspec.Struct, frozen=True, tag="Load"):
    """Load a Hugging Face folder."""

    folder: str
    version: int


class Fence(msgspec.Struct, frozen=True, tag="Fence"):
    """Serve nothing until a later weight sync succeeds: the weights are incomplete or damaged."""

    reason: str


class Ping(msgspec.Struct, frozen=True, tag="Ping"):
    """No order and no answer: sending it fails if the generator is gone."""


class JoinGroup(msgspec.Struct, frozen=True, tag="JoinGroup"):
    """Join the weight group as ranks rank_offset .. rank_offset + world_size of the engine - 1."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float


class Pause(msgspec.Struct, frozen=True, tag="Pause"):
    """Stop between two tokens; keep requests and KV cache."""


class Release(msgspec.Struct, frozen=True, tag="Release"):
    """Stop, put requests back, and give the memory of weights and KV cache back until Reclaim."""


class Reclaim(msgspec.Struct, frozen=True, tag="Reclaim"):
    """Take that memory again, if it was given back; the next weight sync brings weights."""


class Bucket(msgspec.Struct, frozen=True, tag="Bucket"):
    """One flattened broadcast follows: these tensors, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    version: int


class Resume(msgspec.Struct, frozen=True, tag="Resume"):
    """Continue; later tokens carry `version`."""

    version: int


class LeaveGroup(msgspec.Struct, frozen=True, tag="LeaveGroup"):
    """Leave the weight group; another syncer may open a new one."""


class Ack(msgspec.Struct, frozen=True, tag="Ack"):
    """The generator obeyed the message named `done`."""

    done: str


class Failed(msgspec.Struct, frozen=True, tag="Failed"):
    """The generator could not obey the message named `doing`."""

    doing: str
    reason: str
