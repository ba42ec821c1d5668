"""Which deaths of a role are answered by a restart, and when. Pure; used by `supervisor.py`."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_FACTOR = 2.0


@dataclass(frozen=True)
class RestartRule:
    """When a role that died is started again."""

    replica: str
    """Restarts are counted under this name, over all phases of the run."""
    limit: int
    """Restarts a run; after them a death ends the run."""
    until: str
    """Name of the role whose end makes a restart pointless; it may not have been started yet."""
    ready_path: Path
    """The role leaves this file when it is ready; until then only signals count as accidents."""
    key: str = "generator.max_restarts"
    """Of the configuration, where the limit comes from."""


@dataclass(frozen=True)
class Restart:
    """A role that was started again."""

    role: str
    exit_code: int
    """Of its predecessor; minus the signal's number when a signal ended it."""
    count: int
    """Restarts of the replica so far."""
    limit: int


class Answer(Enum):
    """What the death of a role leads to."""

    RESTART = "restart"
    GO_ON = "go on without it"
    END_RUN = "end the run"


@dataclass(frozen=True)
class Death:
    """What decides the answer."""

    exit_code: int
    """Minus the signal's number when a signal ended the role."""
    was_ready: bool
    restarts: int
    """Of the replica so far."""
    is_run_ending: bool
    """The role that tells this one to end has ended in good order."""
    is_too_late: bool
    """`RestartRule.until` has ended."""
    has_siblings: bool
    """Another replica runs, which can take over the work."""


def answer_death(death: Death, limit: int, key: str = RestartRule.key) -> tuple[Answer, str]:
    """The answer to a death under a limit of restarts, and the reason when it is no restart.

    key: of the configuration, where the limit comes from.
    """
    if limit == 0:
        return Answer.END_RUN, ""
    if death.is_run_ending:
        return Answer.GO_ON, "the run is ending"
    if death.is_too_late:
        reason = "it is too late for a restart: nobody would publish weights to it"
        return (Answer.GO_ON if death.has_siblings else Answer.END_RUN), reason
    if death.exit_code > 0 and not death.was_ready:
        return Answer.END_RUN, "not restarted, because it was never ready"
    if death.restarts >= limit:
        return Answer.END_RUN, f"its restarts are used up ({key} = {limit})"
    return Answer.RESTART, ""


def pause_before(restarts: int, first_pause_s: float) -> float:
    """Seconds to wait before the next restart of a replica that had so many."""
    return first_pause_s * _FACTOR**restarts
