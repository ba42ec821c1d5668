"""What the rollout queue sends, and to whom.

Used by the rollout queue: its coordinator makes these, its server sends them.
"""

from typing import NamedTuple

from megatron_rl.protocol.types import AnyMessage

PROMPTS, VERIFY, BATCHES = "prompts", "verify", "batches"


class Outgoing(NamedTuple):
    """A message for a peer of one of the three endpoints."""

    endpoint: str
    peer: str
    message: AnyMessage
