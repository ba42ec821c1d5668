"""Engines on the trainer's GPUs release their memory while the trainer computes.

Runs on every trainer rank; rank 0 sends the messages (Release, Reclaim; StartRequest and MayStart
for engines that start). The engines' turn lasts from the beginning of a weight sync until the
trainer has its next batch.
"""

import logging
import time
from collections.abc import Callable, Mapping

from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import AnyMessage, Hello, Reclaim, Release
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import Conversation, GeneratorLink, Outcome

log = logging.getLogger(__name__)


def end_turn_of_dead_trainer(
    link: GeneratorLink, *, replicas: int, limit_s: float, deadline_s: float
) -> None:
    """Have all engines release their memory, for a trainer that was restarted; on rank 0.

    It died in its own turn or in that of the engines; a second Release does nothing. Engines that
    start meanwhile count once they are ready. limit_s: of the wait for all generators, after which
    a silent one keeps the memory that it has. deadline_s: of the release.
    """
    link.may_start = False
    if not link.await_requests(replicas, limit_s):
        log.warning(
            "%d of %d generators were heard in %.0f s: the engines of the others keep the memory "
            "that they have", len(link.peers), replicas, limit_s
        )  # fmt: skip
    talk = Conversation(link, link.peers, Outcome(), deadline_s)
    talk.ask(Release())
    for reason in talk.outcome.failed.values():
        log.warning("its engine may keep its memory: %s", reason)
    log.info("%d engines have released their memory", len(talk.present))


class MemoryTurns:
    """Whether the engines or the trainer may use the memory of their shared GPUs."""

    def __init__(
        self,
        control: Control,
        link: GeneratorLink | None,
        *,
        deadline_s: float,
        start_timeout_s: float,
        free_cache: Callable[[], None],
    ) -> None:
        """link: on rank 0 only. start_timeout_s: limit of an engine's start.

        free_cache: returns this rank's cached free memory to the device.
        """
        self._control, self._link = control, link
        self._deadline_s, self._start_timeout_s = deadline_s, start_timeout_s
        self._free_cache = free_cache
        self._seconds = {"release": 0.0, "reclaim": 0.0}
        """For which the ranks waited since `pop_metrics`."""

    def pop_metrics(self) -> list[Metric]:
        """Return the seconds of `release` and `reclaim` since the last call."""
        found, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return [Metric(f"weight_sync/{name}_s", value, "max") for name, value in found.items()]

    def end_engines_turn(self) -> None:
        """On rank 0: forbid engine starts, and wait for engines that are starting."""
        if self._link is not None:
            self._link.may_start = False
            self._link.await_starts(time.monotonic() + self._start_timeout_s)

    def begin_engines_turn(self) -> None:
        """Make room for engines, starting ones included. Collective."""
        self._free_cache()
        # Every rank frees its cache before an engine needs the memory.
        self._control.all(True)
        if self._link is not None:
            self._link.may_start = True

    def release(self, members: Mapping[str, Hello]) -> dict[str, str]:
        """Have the engines release their memory; return failed generators with the reason.

        Collective. Engines suspend their requests, and continue them after the next weight sync.
        """
        return self._have_all("release", Release(), members)

    def reclaim(self, members: Mapping[str, Hello]) -> dict[str, str]:
        """Have the engines take their memory again, without its content; return failed generators.

        Collective. An engine that has released nothing does nothing.
        """
        return self._have_all("reclaim", Reclaim(), members)

    def _have_all(
        self, name: str, message: AnyMessage, members: Mapping[str, Hello]
    ) -> dict[str, str]:
        started, outcome = time.monotonic(), Outcome()
        if self._link is not None:
            Conversation(self._link, members, outcome, self._deadline_s).ask(message)
        failed = self._control.share(outcome.failed, dict[str, str])
        self._seconds[name] += time.monotonic() - started
        return failed
