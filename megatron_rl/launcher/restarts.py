"""Which deaths of a role are answered by a restart, and when. Pure; used by `supervisor.py`."""

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
    """When a role that died is started again."""

    replica: str
    """Restarts are counted under this name, over all phases of the run; the queue knows it too."""
    limit: int
    """Restarts of the replica within window_s."""
    window_s: float
    until: str
    """Name of the role whose end makes a restart pointless; it may not have been started yet."""
    ready_path: Path
    """The role leaves this file when it is ready."""
    kind: str = "generator"
    """Replicas of one kind do the same work: one can take over what another one leaves."""
    replicas: int = 1
    """Replicas of this kind in the run, on all nodes."""
    min_replicas: int = 1
    """The run continues without this replica while at least this number is not given up."""

    @property
    def section(self) -> str:
        """Section of [expert] with the limits."""
        return "generator" if self.kind == "follower" else self.kind


def restart_rule(
    config: Config, kind: str, replica: str, *, until: str, role: str = "", replicas: int = 1
) -> RestartRule:
    """The rule of a replica, as the configuration sets it.

    kind: generator, verifier, scorer, or follower: another node's part of an engine, for which the
    rule of the engine's generator decides. role: name of the role, by default the replica's.
    replicas: of this kind in the run, except generators, which the configuration counts.
    """
    minimum = {"generator": config.generator.min_replicas, "follower": 0}.get(kind, 1)
    limits = {"verifier": config.verifier, "scorer": config.scorer}.get(kind, config.generator)
    return RestartRule(
        replica=replica,
        limit=limits.max_restarts,
        window_s=limits.restart_window_s,
        until=until,
        ready_path=config.run.dir / "logs" / f"{role or replica}.ready",
        kind=kind,
        replicas=config.generator.replicas if kind == "generator" else replicas,
        min_replicas=minimum,
    )


class Answer(Enum):
    """What follows the death of a role."""

    RESTART = "restart"
    GIVE_UP = "continue without it until its window allows another restart"
    CONTINUE = "continue without it"
    END_RUN = "end the run"


@dataclass(frozen=True)
class Death:
    """Facts that decide the answer."""

    exit_code: int
    """Minus the signal's number when a signal ended the role."""
    can_start: bool
    """A replica of its kind has been ready in this run, or another one may still become ready."""
    restarts: int
    """Restarts of the replica within the rule's window."""
    is_run_ending: bool
    """The role that tells this one to end has ended in good order."""
    is_too_late: bool
    """`RestartRule.until` has ended."""
    others: int
    """Other replicas of its kind, on all nodes, that are not given up."""


def answer_death(death: Death, rule: RestartRule) -> tuple[Answer, str]:
    """The answer to a death under a rule, and the reason when it is no restart."""
    if death.is_run_ending:
        return Answer.CONTINUE, "the run is ending"
    if death.is_too_late:
        reason = "it is too late for a restart: nobody would sync weights to it"
        return (Answer.CONTINUE if death.others else Answer.END_RUN), reason
    if death.exit_code > 0 and not death.can_start:
        return Answer.END_RUN, "not restarted, because it was never ready"
    if death.restarts < rule.limit:
        return Answer.RESTART, ""
    why = (
        f"its restarts are used up (expert.{rule.section}.max_restarts = {rule.limit} within "
        f"expert.{rule.section}.restart_window_s = {rule.window_s:g})"
    )
    if not rule.limit:
        why = f"it is not restarted (expert.{rule.section}.max_restarts = 0)"
    left = f"{death.others} of {rule.replicas} {rule.kind}s"
    if death.others >= rule.min_replicas:
        return Answer.GIVE_UP, f"{why}; the run continues with {left}"
    if rule.replicas == 1:
        return Answer.END_RUN, why
    return Answer.END_RUN, f"{why}, and {left} are fewer than {rule.min_replicas}"


def pause_before(restarts: int, first_pause_s: float) -> float:
    """Seconds to wait before the next restart of a replica that had that many in its window."""
    return min(_LONGEST_PAUSE_S, first_pause_s * _FACTOR**restarts)


class Replicas:
    """Restarts and failures of the replicas of a launcher. Times: monotonic seconds."""

    def __init__(self) -> None:
        self._restarted_at: dict[str, list[float]] = collections.defaultdict(list)
        """Times of each replica's restarts, over all phases."""
        self._given_up: dict[str, set[str]] = collections.defaultdict(set)
        """Replicas of each kind that wait for their window."""
        self._proven: set[str] = set()
        """Kinds of which a replica has been ready."""
        self.given_up_elsewhere: Mapping[str, int] = {}
        """Replicas of each kind that launchers of other nodes have given up."""

    def restarts(self, rule: RestartRule, now: float) -> int:
        """Restarts of the replica within the rule's window."""
        times = self._restarted_at[rule.replica]
        times[:] = [at for at in times if now - at < rule.window_s]
        return len(times)

    def note_restart(self, rule: RestartRule, now: float) -> int:
        """Count a restart; how many there are now within the window."""
        self.take_back(rule)
        self._restarted_at[rule.replica].append(now)
        return self.restarts(rule, now)

    def give_up(self, rule: RestartRule) -> float | None:
        """Continue without the replica; when its used-up window allows a restart, None: never."""
        self._given_up[rule.kind].add(rule.replica)
        times = self._restarted_at[rule.replica]
        return times[0] + rule.window_s if times and rule.limit else None

    def take_back(self, rule: RestartRule) -> None:
        """The replica is started: in another phase, or again."""
        self._given_up[rule.kind].discard(rule.replica)

    @property
    def given_up(self) -> dict[str, int]:
        """Replicas of each kind that this launcher has given up."""
        return {kind: len(names) for kind, names in self._given_up.items() if names}

    def others(self, rule: RestartRule) -> int:
        """Replicas of the kind but this one, on all nodes, that are not given up."""
        own = len(self._given_up[rule.kind] - {rule.replica})
        return rule.replicas - 1 - own - self.given_up_elsewhere.get(rule.kind, 0)

    def note_ready(self, kind: str) -> None:
        """A replica of the kind has been ready: the configuration is not what keeps others back."""
        self._proven.add(kind)

    def can_start(self, rule: RestartRule, starting_here: int, of_this_node: int) -> bool:
        """Whether a replica of the kind has been ready, or another one may still become so.

        starting_here: others of this host in their first start; of_this_node: all of this host.
        """
        elsewhere = rule.replicas - of_this_node - self.given_up_elsewhere.get(rule.kind, 0)
        return rule.kind in self._proven or starting_here > 0 or elsewhere > 0
