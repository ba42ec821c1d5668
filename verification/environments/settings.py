"""Limits of environments, and how they fail."""

import os
import sys
from pathlib import Path

from megatron_rl.config.reward import EnvironmentsConfig
from megatron_rl.protocol.generator_messages import EnvironmentFault


class EnvironmentSettings(EnvironmentsConfig):
    """How environments run on a node: the run's section, and what the node adds."""

    python: str = sys.executable
    paths: tuple[str, ...] = ()
    """Folders of the user's modules, beside the working directory."""
    log_path: str = "environments.log"
    """File for the output of environments."""
    max_starts: int = 5
    """Starts in a row that may fail; then episodes fail at once for LONGEST_PAUSE_S."""
    first_pause_s: float = 0.5
    """Pause after a failed start; it doubles with each that follows."""


def environment_settings(config: EnvironmentsConfig, log_path: Path) -> EnvironmentSettings:
    """Settings of a run's environments, whose modules are also looked for in PYTHONPATH."""
    values = config.model_dump() | {"python": config.python or sys.executable}
    paths = tuple(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    return EnvironmentSettings(**values, paths=paths, log_path=str(log_path))


class EnvironmentFailed(Exception):
    """An environment did something wrong: the episode has no outcome, and earns no reward."""

    def __init__(self, reason: str, kind: EnvironmentFault) -> None:
        super().__init__(f"{kind}: {reason}")
        self.reason = reason
        self.kind: EnvironmentFault = kind
