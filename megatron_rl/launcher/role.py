"""A started child of a launcher. Used by `supervisor.py`, and read by `live_view.py`."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.observe.deaths import Ending, RoleDied
from megatron_rl.protocol.process import DONE


@dataclass
class Role:
    """One started child."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int
    """Bytes of the log from earlier sessions."""
    started: float
    """time.monotonic() of the start."""
    outlives: str | None = None
    """Name of the role that ends this one, which must not end long before that role."""
    restarts: RestartRule | None = None
    """None: its death ends the run."""
    is_expendable: bool = False
    """The run continues without it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of this role alone."""
    ended: float | None = None
    """time.monotonic() when its end was noticed."""
    restart_at: float | None = None
    """time.monotonic() of its planned restart."""
    is_death_answered: bool = False
    """The supervisor has handled its death, and the run continues."""
    is_restarted: bool = False
    """It is not the first session in its phase."""
    silent_since: float | None = None
    """time.monotonic() since when the queue misses the running role."""
    is_given_up: bool = False
    """Its restarts are used up: the run continues without it until the window allows another."""
    why_killed: str = ""
    """Why the supervisor killed it; "": it did not."""
    death: RoleDied | None = None
    """Explains the death of a role that several nodes share; None: it runs, or has ended well."""

    @property
    def ending(self) -> Ending:
        return Ending(self.name, self.exit_code or 0, self.log_path, self.log_start)

    @property
    def kind(self) -> str:
        """Kind of replica; empty for a role whose death ends the run."""
        return "" if self.restarts is None else self.restarts.kind

    @property
    def is_ready(self) -> bool:
        """Whether it runs and has written its ready file."""
        rule = self.restarts
        return self.ended is None and rule is not None and rule.ready_path.exists()

    @property
    def is_done(self) -> bool:
        """Whether all its work is on the disk."""
        rule = self.restarts
        return rule is not None and rule.ready_path.exists() and rule.ready_path.read_text() == DONE

    @property
    def generations(self) -> int | None:
        """Generations of its processes that must not be stopped; None: all."""
        # A verifier stops grading processes itself, below its fork server, and watches them.
        return 1 if self.kind == "verifier" else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N when signal N ended it."""
        return self.process.returncode
