"""Completions that the queue has not confirmed: a killed queue loses what it had not written down.

Used by the generator's event loop. Times are monotonic seconds.
"""

import dataclasses
import logging

from megatron_rl.protocol.types import RolloutDone

log = logging.getLogger(__name__)

AGAIN_S = 6.0
"""After this long without a confirmation a completion is sent again; doubles each time. A restarted
queue is back sooner."""
MOST_SENDS = 8
LATE_S = 3.0
"""The queue confirms once a second."""


@dataclasses.dataclass
class _Sent:
    message: RolloutDone
    first_at: float
    again_at: float
    sends: int = 1


class Unconfirmed:
    """The sent completions, by lease and index."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], _Sent] = {}

    def note_sent(self, message: RolloutDone, now: float) -> None:
        """Keep a completion that was sent for the first time."""
        rollout = message.rollout
        self._sent[rollout.lease_id, rollout.index] = _Sent(message, now, now + AGAIN_S)

    def confirm(self, completions: list[tuple[int, int]]) -> None:
        """Forget completions, (lease id, index); unknown ones were confirmed before."""
        for key in completions:
            self._sent.pop(key, None)

    def pop_due(self, now: float) -> list[RolloutDone]:
        """The completions to send again now; those that were sent MOST_SENDS times are dropped."""
        due = []
        for key, sent in list(self._sent.items()):
            if now < sent.again_at:
                continue
            if sent.sends >= MOST_SENDS:
                log.warning("completion %d of lease %d was never confirmed", key[1], key[0])
                del self._sent[key]
                continue
            sent.again_at = now + AGAIN_S * 2**sent.sends
            sent.sends += 1
            due.append(sent.message)
        return due

    def late_leases(self, now: float) -> set[int]:
        """Leases with a completion whose confirmation is late: to the queue they are not lost."""
        return {key[0] for key, sent in self._sent.items() if now - sent.first_at > LATE_S}
