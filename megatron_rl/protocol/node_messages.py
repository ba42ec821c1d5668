"""What the launchers of a run's nodes say to each other.

Imported by every process by way of `types.py`. First node (ROUTER) <-> the others (DEALER).
"""

import enum

import msgspec


class PhaseKind(enum.StrEnum):
    """What the nodes of a run do together; `launcher/phases.py` says what each means."""

    COLD_START = "cold start"
    EVALUATION = "evaluation"
    TRAINING = "training"
    SFT_BASELINE = "sft_baseline"
    END = "end"


class RoleRestart(msgspec.Struct, frozen=True):
    """A role of a node that was started again."""

    role: str
    kind: str
    """Replicas of one kind do the same work: "generator", "verifier"."""
    exit_code: int
    """Of the role's predecessor; minus the signal's number when a signal ended it."""
    count: int
    """Restarts of the replica within the window of its rule, this one included."""
    limit: int
    number: int = 0
    """From 1, over all restarts of a node that tells the first one; 0: not told."""


class NodeState(msgspec.Struct, frozen=True, tag="NodeState"):
    """How a node stands: sent about once a second, after every change, and when it ends early."""

    node: int
    """Its place, from 1: the first node, 0, tells itself nothing."""
    nodes: int
    """How many it was told that there are."""
    address: str
    """Where the other nodes reach it."""
    session: int
    """Differs after a restart."""
    ended: int
    """Number of the phase whose processes it has ended; 0: none yet."""
    error: str = ""
    """Why it leaves the run."""
    restarts: tuple[RoleRestart, ...] = ()
    """The latest ones: each is said several times, and counts once by its number."""
    given_up: dict[str, int] = {}
    """Kind of role -> replicas that used up their restarts there."""


class RunPhase(msgspec.Struct, frozen=True, tag="RunPhase"):
    """What all nodes are to do now: the answer to every NodeState."""

    number: int
    """From 1."""
    kind: PhaseKind
    label: str = ""
    """Of an evaluation."""
    model: str = ""
    """Folder of the model that the phase begins with."""
    has_cold_start: bool = False
    """Training alone: the cold start comes first, in the same phase."""
    is_ending: bool = False
    """Its queue has ended: what it told to stop closes."""
    error: str = ""
    """Why the first node leaves the run."""
    given_up: dict[str, int] = {}
    """As in NodeState, summed over all nodes."""
    addresses: dict[int, str] = {}
    """Where each node is reached, of those that the first one has heard."""
    missing: list[str] = []
    """Replicas that the queue has heard before and does not hear now."""
