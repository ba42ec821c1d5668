"""Circuit breakers of leases: for an engine that only fails, and for an environment. Pure.

Used by the rollout queue. An engine or environment that is down fails each completion at once.
Without a breaker it would use up the attempts of all completions within milliseconds.

| breaker | trips after | then |
|---|---|---|
| `EngineBreaker` | 3 failed completions in a row | the engine gets one completion at a time |
| `EnvironmentBreaker` | 8 in a row, of 2 groups | conversations of its task wait, but for a probe |

Each probe doubles the pause before the next one. One success ends the pause.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_rl.protocol.generator_messages import RolloutFailed
from megatron_rl.rollout_queue.diagnosis import Finding
from megatron_rl.rollout_queue.drop_reasons import ENVIRONMENT_FAILED, TooManyFailures
from megatron_rl.rollout_queue.unleased_groups import OpenLease, PendingGroup

log = logging.getLogger(__name__)

FAILURES = 3
"""Different completions that an engine must fail in a row to trip its breaker: a completion that
fails repeatedly may itself be at fault."""
PAUSE_S = 1.0
"""What tripped gets nothing for this long, then one completion: a probe."""
MAX_PAUSE_S = 60.0
"""Each failed probe doubles the pause, up to this limit."""
HOPELESS_PROBES = 6
"""The run ends when every generator failed this number of probes, which takes at least a minute."""
ENVIRONMENT_FAILURES, ENVIRONMENT_GROUPS = 8, 2
"""Failures of an environment in a row, and groups of them: one prompt may be at fault."""
PROBES_WITHOUT_SUCCESS, PROBES = 5, 30
"""The run ends after this number of failed probes of an environment that never worked, which takes
half a minute, or that worked before, which takes 25 minutes."""
_SHOWN_CHARS = 300


class Failed(NamedTuple):
    """A completion that an engine or an environment failed."""

    pending: PendingGroup
    index: int


@dataclasses.dataclass
class _Streak:
    """Failures since the last success."""

    failures: list[Failed] = dataclasses.field(default_factory=list)
    """Failures before the breaker tripped."""
    tripped_at: float | None = None
    pause_s: float = PAUSE_S
    probes: int = 0
    """Failed probes."""
    resumes_at: float = 0.0
    """When the next probe may be leased."""

    def trip(self, now: float) -> None:
        self.tripped_at, self.resumes_at = now, now + self.pause_s

    def lengthen_pause(self, now: float) -> None:
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
        self.resumes_at = now + self.pause_s


def _end_streak(streaks: dict[str, _Streak], key: str) -> bool:
    """A success ends a streak; returns whether that ends a pause."""
    streak = streaks.pop(key, None)
    return streak is not None and streak.tripped_at is not None


class EngineBreaker:
    """Failure streaks of generators, by name."""

    def __init__(self) -> None:
        self._streaks: dict[str, _Streak] = {}
        self._sessions: dict[str, int] = {}
        """The latest session of each generator, also of one that is gone."""

    def note_session(self, name: str, session: int) -> None:
        """A generator is there; the failures of an earlier process say nothing about a new one."""
        if self._sessions.get(name) != session:
            self._streaks.pop(name, None)
        self._sessions[name] = session

    def note_success(self, name: str) -> bool:
        """A completion came back; returns whether that ends a pause."""
        if ends_pause := _end_streak(self._streaks, name):
            log.warning("generator %s generates again", name)
        return ends_pause

    def note_failure(self, name: str, failed: Failed, leased_at: float, now: float) -> list[Failed]:
        """The engine failed a completion; returns the failures that are the engine's fault."""
        streak = self._streaks.setdefault(name, _Streak())
        if streak.tripped_at is None:
            streak.failures.append(failed)
            if len({(one.pending.group.number, one.index) for one in streak.failures}) < FAILURES:
                return []
            streak.trip(now)
            log.warning(
                "generator %s failed %d completions in a row: it gets one at a time", name, FAILURES
            )
            return streak.failures
        # Leases from before the breaker tripped fail in one burst: only probes count.
        if leased_at > streak.tripped_at:
            streak.probes += 1
            streak.lengthen_pause(now)
        return [failed]

    def are_hopeless(self, names: Iterable[str]) -> bool:
        """Whether all of these generators fail every probe."""
        streaks = [self._streaks.get(name) for name in names]
        return bool(streaks) and all(
            streak is not None and streak.probes >= HOPELESS_PROBES for streak in streaks
        )

    def limits(self, now: float) -> dict[str, int]:
        """Maximum completions of each tripped generator now."""
        return {
            name: int(now >= streak.resumes_at)
            for name, streak in self._streaks.items()
            if streak.tripped_at is not None
        }


class EnvironmentBreaker:
    """Failure streaks of environments, by task."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        """targets: environment of each task that has one."""
        self.targets = targets
        self._streaks: dict[str, _Streak] = {}
        self._last: dict[str, str] = {}
        """By task: the last failure."""
        self._proven: set[str] = set()
        """Tasks of which a conversation has ended."""

    def note_success(self, task: str) -> bool:
        """A conversation ended with a rollout; returns whether that ends a pause."""
        self._proven.add(task)
        if ends_pause := _end_streak(self._streaks, task):
            log.warning("the environment of task %r works again", task)
        return ends_pause

    def note_failure(self, lease: OpenLease, failure: RolloutFailed, now: float) -> bool:
        """A conversation failed; returns whether its task waits from now on.

        Failures of an environment that is down count as no attempts of their completions. Raises
        TooManyFailures if it does not work again.
        """
        task, failed = lease.pending.group.prompt.task, Failed(lease.pending, failure.index)
        streak = self._streaks.setdefault(task, _Streak())
        self._last[task] = failure.reason[:_SHOWN_CHARS]
        if streak.tripped_at is not None:
            failed.pending.attempts.subtract([failed.index])
            streak.probes += lease.leased_at > streak.tripped_at
            self._check(task, streak)
            return False
        streak.failures.append(failed)
        groups = {one.pending.group.number for one in streak.failures}
        if len(streak.failures) < ENVIRONMENT_FAILURES or len(groups) < ENVIRONMENT_GROUPS:
            return False
        streak.trip(now)
        for one in streak.failures:
            one.pending.attempts.subtract([one.index])
        log.error("%s", self._text(task))
        return True

    def _check(self, task: str, streak: _Streak) -> None:
        if streak.probes < (PROBES if task in self._proven else PROBES_WITHOUT_SUCCESS):
            return
        raise TooManyFailures(
            f"{self._text(task)}. {streak.probes} more conversations failed, one after the other. "
            "Then repeat the run's command: it resumes from its newest checkpoint"
        )

    def find_due(self, now: float) -> list[str]:
        """Tasks that wait, and may lease a probe now."""
        return [
            task
            for task, streak in self._streaks.items()
            if streak.tripped_at is not None and now >= streak.resumes_at
        ]

    def note_probe(self, task: str, now: float) -> None:
        """A probe is leased. It may take minutes, so the pause begins with it, not with its end."""
        self._streaks[task].lengthen_pause(now)

    def find_trouble(self) -> Finding | None:
        """The likely fault and fix of a task that waits."""
        for task, streak in self._streaks.items():
            if streak.tripped_at is not None:
                return Finding(ENVIRONMENT_FAILED, self._text(task))
        return None

    def _text(self, task: str) -> str:
        return (
            f"Conversations of task {task!r} wait, except for one now and then: its environment "
            f"{self.targets[task]!r} failed {ENVIRONMENT_FAILURES} of them in a row. The last one: "
            f"{self._last[task]!r}. Fix what it names; logs/environments-*.log have the output of "
            "environments"
        )
