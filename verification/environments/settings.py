"""Limits of environments, and how they fail."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.reward import EnvironmentsConfig
from megatron_rl.protocol.generator_messages import EnvironmentFault


@dataclass(frozen=True)
class EnvironmentSettings:
    """How environments run on a node."""

    python: str = sys.executable
    """Interpreter, from Python 3.9; it needs none of our packages."""
    start_timeout_s: float = 60.0
    """Time for the interpreter to start and import the user's module."""
    turn_timeout_s: float = 60.0
    """Time of the environment between two requests of it."""
    episode_timeout_s: float = 600.0
    """Time of the environment in all. The clock stops while the policy generates."""
    memory_bytes: int = 4 << 30
    """Address space of each process of an episode, with what its module's import has mapped."""
    max_episodes: int = 64
    """Episodes at once, of all environments of the node."""
    max_message_bytes: int = 1 << 20
    """Longest message between an environment and the host."""
    paths: tuple[str, ...] = ()
    """Folders of the user's modules, beside the working directory."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that pass; others do not, but for a few such as PATH."""
    log_path: str = "environments.log"
    """File for the output of environments."""
    max_starts: int = 5
    """Starts in a row that may fail; then episodes fail at once for LONGEST_PAUSE_S."""
    first_pause_s: float = 0.5
    """Pause after a failed start; it doubles with each that follows."""


def environment_settings(config: EnvironmentsConfig, log_path: Path) -> EnvironmentSettings:
    """Settings of a run's environments, whose modules are also looked for in PYTHONPATH."""
    values = config.model_dump() | {
        "python": config.python or sys.executable,
        "variables": tuple(config.variables),
    }
    paths = tuple(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    return EnvironmentSettings(**values, paths=paths, log_path=str(log_path))


class EnvironmentFailed(Exception):
    """An environment did something wrong: the episode has no outcome, and earns no reward."""

    def __init__(self, reason: str, kind: EnvironmentFault) -> None:
        super().__init__(f"{kind}: {reason}")
        self.reason = reason
        self.kind: EnvironmentFault = kind
