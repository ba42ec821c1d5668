"""Decides whether and when a role that died is restarted. Pure; used by `supervisor.py`."""

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron_rl.config.tree import Config

_FACTOR = 2.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class RestartRule:
    """Limits for the restarts of a role."""

    replica: str
    """Name under which restarts are counted, over all phases; also the name in the queue."""
    limit: int
    """Restarts of the replica within window_s."""
    window_s: float
    until: str
    """Name of a role, started or not, after whose end a restart is pointless."""
    ready_path: Path
    """File that the role writes when it is ready."""
    kind: str = "generator"
    """Replicas of one kind do the same work and can replace each other."""
    replicas: int = 1
    """Replicas of this kind in the run, on all nodes."""
    min_replicas: int = 1
    """The run may continue without this replica while this number of others is left."""
    only_killed: bool = False
    """Restarted only when a signal ended it: it ends with an error only if the run must end."""
    is_shared: bool = False
    """It lies on several nodes, which restart it together (`shared_trainer.py`)."""


def section_of(kind: str) -> str:
    """Section of the configuration, and of [expert], with the limits of a kind."""
    return {"follower": "generator", "trainer": "train"}.get(kind, kind)


def restart_rule(
    config: Config, kind: str, replica: str, *, until: str, role: str = "", replicas: int = 1
) -> RestartRule:
    """The rule of a replica, as the configuration sets it.

    kind: queue, trainer, generator, verifier, scorer, or follower: another node's part of an
    engine, for which the rule of the engine's generator decides. role: name of the role, by default
    the replica's. replicas: of this kind in the run, except generators, which the configuration
    counts.
    """
    minimum = {"generator": config.generator.min_replicas, "follower": 0}.get(kind, 1)
    limits = getattr(config, section_of(kind))
    return RestartRule(
        replica=replica,
        limit=limits.max_restarts,
        window_s=limits.restart_window_s,
        until=until,
        ready_path=config.run.dir / "logs" / f"{role or replica}.ready",
        kind=kind,
        replicas=config.generator.replicas if kind == "generator" else replicas,
        min_replicas=minimum,
        only_killed=kind in ("queue", "trainer"),
    )


class Answer(Enum):
    """Consequence of a death."""

    RESTART = "restart"
    GIVE_UP = "continue without it until its window allows another restart"
    CONTINUE = "continue without it"
    END_RUN = "end the run"


@dataclass(frozen=True)
class Death:
    """Facts about a death."""

    exit_code: int
    """-N when signal N ended the role, or one of its ranks; 0 when its node is lost."""
    can_start: bool
    """A replica of its kind was ready in this run, or another one may still become ready."""
    restarts: int
    """Restarts of the replica within the rule's window."""
    is_run_ending: bool
    """The role that ends this one has ended with exit code 0, or all its work is on the disk."""
    is_too_late: bool
    """`RestartRule.until` has ended with exit code 0."""
    others: int
    """Other replicas of its kind on all nodes, without given-up ones."""


def answer_death(death: Death, rule: RestartRule) -> tuple[Answer, str]:
    """The answer to a death, and its reason unless it is a restart."""
    if death.is_run_ending:
        return Answer.CONTINUE, "the run is ending"
    if death.is_too_late:
        reason = "it is too late for a restart: nobody would sync weights to it"
        return (Answer.CONTINUE if death.others else Answer.END_RUN), reason
    if death.exit_code > 0 and rule.only_killed:
        return Answer.END_RUN, ""
    if death.exit_code > 0 and not death.can_start:
        return Answer.END_RUN, "not restarted, because it was never ready"
    if death.restarts < rule.limit:
        return Answer.RESTART, ""
    section = f"expert.{section_of(rule.kind)}"
    why = (
        f"its restarts are used up ({section}.max_restarts = {rule.limit} within "
        f"{section}.restart_window_s = {rule.window_s:g})"
    )
    if not rule.limit:
        why = f"it is not restarted ({section}.max_restarts = 0)"
    left = f"{death.others} of {rule.replicas} {rule.kind}s"
    if death.others >= rule.min_replicas:
        return Answer.GIVE_UP, f"{why}; the run continues with {left}"
    if rule.replicas == 1:
        return Answer.END_RUN, why
    return Answer.END_RUN, f"{why}, and {left} are fewer than {rule.min_replicas}"


def pause_before(restarts: int, first_pause_s: float) -> float:
    """Seconds before the next restart, after this number of restarts within the window."""
    return min(_LONGEST_PAUSE_S, first_pause_s * _FACTOR**restarts)


class Replicas:
    """Restarts and given-up replicas of a launcher. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._restarted_at: dict[str, list[float]] = collections.defaultdict(list)
        """Restart times by replica, over all phases."""
        self._given_up: dict[str, set[str]] = collections.defaultdict(set)
        """Given-up replicas by kind, which wait for their window."""
        self._proven: set[str] = set()
        """Kinds with a replica that was ready."""
        self.given_up_elsewhere: Mapping[str, int] = {}
        """Number of given-up replicas on other nodes, by kind."""

    def restarts(self, rule: RestartRule, now: float) -> int:
        """Restarts of the replica within the rule's window."""
        times = self._restarted_at[rule.replica]
        times[:] = [at for at in times if now - at < rule.window_s]
        return len(times)

    def note_restart(self, rule: RestartRule, now: float) -> int:
        """Count a restart; returns the number within the window."""
        self.take_back(rule)
        self._restarted_at[rule.replica].append(now)
        return self.restarts(rule, now)

    def give_up(self, rule: RestartRule) -> float | None:
        """Give up a replica; returns when its window allows another restart, None for never."""
        self._given_up[rule.kind].add(rule.replica)
        times = self._restarted_at[rule.replica]
        return times[0] + rule.window_s if times and rule.limit else None

    def take_back(self, rule: RestartRule) -> None:
        """Note that a replica starts, in another phase or again."""
        self._given_up[rule.kind].discard(rule.replica)

    @property
    def given_up(self) -> dict[str, int]:
        """Number of given-up replicas of this launcher, by kind."""
        return {kind: len(names) for kind, names in self._given_up.items() if names}

    def others(self, rule: RestartRule) -> int:
        """Other replicas of the kind on all nodes, without given-up ones."""
        own = len(self._given_up[rule.kind] - {rule.replica})
        return rule.replicas - 1 - own - self.given_up_elsewhere.get(rule.kind, 0)

    def note_ready(self, kind: str) -> None:
        """Note that a replica of the kind was ready, so the configuration is not at fault."""
        self._proven.add(kind)

    def can_start(self, rule: RestartRule, starting_here: int, of_this_node: int) -> bool:
        """Whether a replica of the kind was ready or may still become ready.

        starting_here: other replicas of this node in their first start. of_this_node: all of them.
        """
        elsewhere = rule.replicas - of_this_node - self.given_up_elsewhere.get(rule.kind, 0)
        return rule.kind in self._proven or starting_here > 0 or elsewhere > 0
