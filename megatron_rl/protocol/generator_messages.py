"""Messages of the rollout queue and generators, except for leases and rollouts.

Imported by every process. On the prompts endpoint: queue (ROUTER) <-> generators (DEALER).
"""

import msgspec

PROMPT_UNRENDERABLE = "prompt_unrenderable"
"""The prompt cannot be put into tokens, or leaves no room for a completion."""


class EngineActivity(msgspec.Struct, frozen=True):
    """Sums of a generator since it was first ready to serve."""

    idle_s: float = 0.0
    busy_s: float = 0.0
    """Seconds in which it had a completion to work on."""
    tokens: int = 0
    """Of the completions that it finished."""
    running: int = 0
    """Completions in flight now."""


class GeneratorReady(msgspec.Struct, frozen=True, tag="GeneratorReady"):
    """State of a generator, sent at start, after every change of it, and as heartbeat.

    The queue counts what it leased: free room = capacity - leased and not yet returned.
    """

    capacity: int
    """Completions it runs at once."""
    version: int
    """Policy version of its weights; -1 before the first weight sync, when it takes no leases."""
    session: int
    """Differs after a restart: leases of the earlier session are lost."""
    is_held: bool = False
    """It keeps this version; the syncer was told so before."""
    leases: list[int] | None = None
    """Ids of the leases of which it still owes completions; None: it does not say."""
    activity: EngineActivity | None = None
    """Sums since the session began, so that a lost heartbeat loses nothing; None: not told."""


class Hold(msgspec.Struct, frozen=True, tag="Hold"):
    """Keep the weights that you have, or take part in weight syncs again; answered by its state."""

    is_held: bool


class RolloutFailed(msgspec.Struct, frozen=True, tag="RolloutFailed"):
    """The engine could not generate this completion; the queue leases it again."""

    lease_id: int
    index: int
    reason: str
    drop_as: str = ""
    """Set where another try must fail too: the reason to drop the group at once, from the table of
    `rollout_queue/drop_reasons.py`, such as PROMPT_UNRENDERABLE."""


class Cancel(msgspec.Struct, frozen=True, tag="Cancel"):
    """Stop generating what is left of a lease: nobody waits for it any more. No answer."""

    lease_id: int
