"""Messages of the prompts endpoint, except leases and rollouts. Imported by every process."""

from typing import Literal

import msgspec

from megatron_rl.protocol.limits import Count, Id, Seconds, Version

PROMPT_UNRENDERABLE = "prompt_unrenderable"
"""The prompt cannot be tokenized, or leaves no room for a completion."""

EnvironmentFault = Literal["crash", "hang", "flood", "start", "exception", "bad_outcome", "judge"]
"""What an environment did wrong: its process ended, was too slow, sent too much, did not start,
raised an exception or returned an invalid outcome; judge: the judge did not answer it."""


class EngineActivity(msgspec.Struct, frozen=True):
    """Sums since a generator was first ready to serve, and what it holds now."""

    idle_s: Seconds = 0.0
    busy_s: Seconds = 0.0
    """Seconds with a completion in flight."""
    tokens: Id = 0
    """Tokens of finished completions."""
    running: Count = 0
    """Completions in flight now."""
    turns: Id = 0
    """Finished replies in conversations with environments."""
    conversations: Count = 0
    """Conversations with environments that are open now."""
    in_environment: Count = 0
    """Open conversations that wait for their environment; the others wait for the engine."""


class GeneratorReady(msgspec.Struct, frozen=True, tag="GeneratorReady"):
    """State of a generator, sent at start, after every change, and as heartbeat.

    The queue computes free room = capacity - leased and not yet returned.
    """

    capacity: Count
    """Maximum number of completions at once."""
    version: Version
    """Policy version of its weights; -1 before the first weight sync, when it takes no leases."""
    session: int
    """Differs after a restart: leases of the earlier session are lost."""
    is_held: bool = False
    """It keeps this version; it told the syncer before."""
    leases: list[Id] | None = None
    """Ids of its unfinished leases; None: not reported."""
    activity: EngineActivity | None = None
    """Sums since the session began, so that a lost heartbeat loses nothing; None: not reported."""
    active: list[Id] = []
    """Leases whose conversations ended a turn since the last report, or wait for their environment
    or a place for it: they are not stuck."""
    is_leaving: bool = False
    """It takes no further lease, and gives back those that it does not name. The queue answers one
    that names none with Stop, and forgets it."""


class Hold(msgspec.Struct, frozen=True, tag="Hold"):
    """Keep the current weights, or take part in weight syncs again; answered by GeneratorReady."""

    is_held: bool


class RolloutFailed(msgspec.Struct, frozen=True, tag="RolloutFailed"):
    """The engine, or the environment, failed this completion; the queue leases it again."""

    lease_id: Id
    index: Count
    reason: str
    drop_as: str = ""
    """Reason to drop the group at once, if another try must fail too: one of `drop_reasons.py`."""
    fault: Literal["engine", "none", EnvironmentFault] = "engine"
    """What failed; none: a completion that the queue itself cannot use."""

    @property
    def is_environments(self) -> bool:
        """Whether the environment failed, and not the engine."""
        return self.fault not in ("engine", "none")


class RolloutsTaken(msgspec.Struct, frozen=True, tag="RolloutsTaken"):
    """The queue has these completions on its disk, or does not need them. Sent once a second."""

    completions: list[tuple[Id, Count]]
    """(lease id, index)."""


class Cancel(msgspec.Struct, frozen=True, tag="Cancel"):
    """Stop the remaining completions of a lease. No answer."""

    lease_id: Id
