"""Answers the trainer's SaveState requests, each once all records before it are on the disk.

Used by the rollout queue: a run that is resumed from the state does not write those records again.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.rollout_queue.outgoing import BATCHES, Outgoing
from megatron_rl.rollout_queue.record import Recorder

log = logging.getLogger(__name__)


class _Saving(NamedTuple):
    """A state that a trainer asked for."""

    peer: str
    state: QueueState
    records: int
    """Jobs of the recorder that must be on the disk before."""


class StateDesk:
    """States that wait for the disk, in the order of their requests."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: list[_Saving] = []
        self._saved_step = -1

    def is_repeated(self, peer: str, step: int, *, formed_steps: int) -> bool:
        """Whether the state after `step` waits already, or was sent and later batches are formed.

        An answer crossed such a request.
        """
        if any(one.peer == peer and one.state.step == step for one in self._waiting):
            return True
        if step == self._saved_step < formed_steps:
            log.info("%s asked twice for the state after step %d", peer, step)
            return True
        return False

    def put(self, peer: str, state: QueueState) -> None:
        """Send a state once what was recorded so far is on the disk."""
        self._saved_step = state.step
        self._waiting.append(_Saving(peer, state, self._recorder.put))

    def answers(self) -> Iterator[Outgoing]:
        """States before which all records are on the disk."""
        while self._waiting and self._recorder.written >= self._waiting[0].records:
            saving = self._waiting.pop(0)
            yield Outgoing(BATCHES, saving.peer, saving.state)
