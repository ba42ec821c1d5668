"""Messages between the launchers of a run's nodes: first node (ROUTER) <-> others (DEALER).

Imported by every process through `types.py`.
"""

import enum

import msgspec

from megatron_rl.protocol.limits import Change, Count, Name, Size


class PhaseKind(enum.StrEnum):
    """Phases of a run; see `launcher/phases.py`."""

    COLD_START = "cold start"
    EVALUATION = "evaluation"
    TRAINING = "training"
    SFT_BASELINE = "sft_baseline"
    END = "end"


class RoleRestart(msgspec.Struct, frozen=True):
    """A restarted role of a node."""

    role: str
    kind: str
    """Replicas of one kind do the same work: "generator", "verifier"."""
    exit_code: int
    """Exit code of the process that died; minus the number of a signal that killed it."""
    count: Count
    """Restarts of the replica within the window of its rule, this one included."""
    limit: Count
    number: Count = 0
    """Counts the restarts of a node from 1; 0: on the first node."""
    why: str = ""
    """Why the launcher killed the process; "": it did not."""


class TrainerOrder(msgspec.Struct, frozen=True):
    """Which start of a trainer on several nodes is to run."""

    start: Count = 0
    """Number of its latest start, from 1; 0: none yet."""
    stop: Count = 0
    """Starts up to this number are over: their processes are to be ended."""


class TrainerPart(msgspec.Struct, frozen=True):
    """A node's part of a trainer on several nodes."""

    start: Count = 0
    """Number of the start that it tells of; 0: this launcher has started no rank yet."""
    is_over: bool = True
    """None of its processes is left."""
    exit_code: int | None = None
    """Once they have ended: 0, or -N when signal N ended torchrun or a rank, or another code."""
    text: str = ""
    """Explains their death."""


class NodeState(msgspec.Struct, frozen=True, tag="NodeState"):
    """State of a node: sent about once a second, after every change, and when it ends early."""

    node: Count
    """Its number, from 1; the first node, 0, sends no state. From `nodes` on: it joined later."""
    nodes: Size
    """Number of nodes that the run was started with."""
    address: Name
    """Where the other nodes reach it."""
    session: int
    """Differs after a restart."""
    ended: Count
    """Number of the phase whose processes it has ended; 0: none yet."""
    error: str = ""
    """Why it leaves the run."""
    signal: Count = 0
    """Number of the signal that ended it; 0: none. A run that stops as asked ends by SIGTERM."""
    has_failed: bool = False
    """It leaves because one of its roles has failed."""
    restarts: tuple[RoleRestart, ...] = ()
    """The latest restarts; each is sent several times, and counts once by its number."""
    given_up: dict[str, Count] = {}
    """Kind of role -> replicas that used up their restarts."""
    replicas: dict[str, Count] = {}
    """Kind of role -> its replicas on this node."""
    gpus_per_node: Count = 0
    """GPUs of each configured node, by which it placed all roles; 0: it has no GPUs, or joined."""
    is_joined: bool = False
    """It was started by `megatron-rl join`: its replicas come on top of the configured ones."""
    is_vital: bool = True
    """The run cannot continue without it."""
    is_leaving: bool = False
    """It leaves in good order: its roles finish or give back what they hold."""
    trainer: TrainerPart = TrainerPart()
    """Its part of a trainer on several nodes."""


class RunPhase(msgspec.Struct, frozen=True, tag="RunPhase"):
    """The current phase for all nodes: the answer to every NodeState."""

    number: Count
    """From 1."""
    kind: PhaseKind
    label: str = ""
    """Label of an evaluation."""
    model: str = ""
    """Folder of the initial model of the phase."""
    has_cold_start: bool = False
    """The cold start comes first in this training phase."""
    scorer_node: Count = 0
    """Node that runs the scorer, where the run has one."""
    is_ending: bool = False
    """The queue of the phase has ended, and the other roles are ending."""
    error: str = ""
    """Why the first node leaves the run, or refuses a launcher."""
    signal: Count = 0
    """As in NodeState, of the first node."""
    started: float = 0.0
    """As the first node has written it to the run folder (`observe/heartbeat.py`)."""
    refused: int = 0
    """Session of a launcher without a place in the run; 0: none is refused."""
    given_up: dict[str, Change] = {}
    """As in NodeState, summed over all nodes; less than 0 where more have joined."""
    addresses: dict[Count, Name] = {}
    """Where each node is reached, of those that the first one has heard."""
    missing: list[str] = []
    """Replicas that the queue heard before and no longer hears."""
    trainer: TrainerOrder = TrainerOrder()
    """What the nodes of a trainer on several nodes are to do."""
