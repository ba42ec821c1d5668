"""Calls of rank 0 to the senders of one generator in the exchange's store, and their answers.

Shared by trainer ranks and engine ranks, which both may send.
"""

import msgspec

from megatron_rl.protocol.types import Receive

ENGINE_MARGIN_S = 2.0
"""The senders' deadline ends so much later than the receivers': a receiver that is late then has
time to report why, and its error says more than a sender's."""


class Call(msgspec.Struct, frozen=True):
    """What rank 0 tells the senders of one generator."""

    receive: Receive | None = None
    """The transfer that begins; None: the weight sync to this generator is over."""
    left_s: float = 0.0
    """Until the transfer's deadline."""


def prepared_key(call: int, rank: int) -> str:
    """Set by a sender to "" when it can begin, else to why not.

    call: number of the call that it waits for.
    """
    return f"prepared/{call}/{rank}"


def call_key(call: int) -> str:
    """Set by rank 0 to a `Call`."""
    return f"call/{call}"


def failed_key(attempt: int) -> str:
    """Set by a sender that could not send, to the reason."""
    return f"failed/{attempt}"


def gives_key(rank: int) -> str:
    """Set by rank 0 to the parcels that a sender gives, round by round, where it is an engine's."""
    return f"gives/{rank}"
