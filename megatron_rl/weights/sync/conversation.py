"""Rank 0's conversation with generators that all do the same, at the same time.

Runs on trainer rank 0. They are told together and waited for together; one that fails is fenced and
left behind.
"""

import logging
import time
from collections.abc import Callable, Sequence

from megatron_rl.protocol.types import AnyMessage, Fence, Resume
from megatron_rl.weights.sync.link import GeneratorLink, GeneratorLost
from megatron_rl.weights.sync.members import Member, Outcome

log = logging.getLogger(__name__)


class Conversation:
    """With the generators of a weight sync, lost one by one."""

    def __init__(
        self, link: GeneratorLink, members: Sequence[Member], outcome: Outcome, deadline_s: float
    ) -> None:
        """outcome: those that are lost are added to it."""
        self._link, self._outcome = link, outcome
        self._deadline_s = deadline_s
        self._started = time.monotonic()
        self.names = [member.name for member in members]
        for member in members:
            link.begin(member.name, member.hello.session)

    def ask(self, message: AnyMessage) -> None:
        """Have all that are left obey, at the same time and within one deadline."""
        ends_at = time.monotonic() + self._deadline_s
        # First all are told, then all are waited for: they work at the same time.
        self._each(lambda name: self._link.tell(name, message))
        self._each(lambda name: self._link.await_ack(name, message, ends_at))

    def _each(self, act: Callable[[str], None]) -> None:
        for name in list(self.names):
            try:
                act(name)
            except GeneratorLost as error:
                self.lose(name, str(error))

    def lose(self, name: str, reason: str) -> None:
        """Go on without one."""
        self.names.remove(name)
        self._outcome.failed[name] = reason
        try:
            self._link.tell(name, Fence(reason))
        except GeneratorLost as error:
            log.info("%s", error)

    def resume(self, version: int) -> None:
        """Let those that are left go on."""
        self.ask(Resume(version))
        self._outcome.pauses_s += [time.monotonic() - self._started] * len(self.names)
