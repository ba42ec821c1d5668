"""What the phases of one run share: its children, the view of it, the clock of its phases.

Used by `run.py`, in its one thread.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    ranks_environment,
    role_environment,
)
from megatron_rl.config.tree import Config
from megatron_rl.launcher.live_view import LiveView
from megatron_rl.launcher.placement import NodeRoles, gpu_environment, listed_gpus, place
from megatron_rl.launcher.restarts import RestartRule
from megatron_rl.launcher.roster import write_restart
from megatron_rl.launcher.run_folder import FolderLock
from megatron_rl.launcher.supervisor import POLL_S, Supervisor
from megatron_rl.protocol.wire import DeadlineExceeded

# A role that was told to stop has this long to close its children before they are ended.
_SERVING_END_S = 30.0

log = logging.getLogger(__name__)


class Session:
    """The children of a run, ended when it is left; a context manager."""

    def __init__(
        self, config: Config, console: Console, *, lock: FolderLock, is_resumed: bool = False
    ) -> None:
        """lock: of the run folder."""
        self.config = config
        self.is_resumed = is_resumed
        self.wall_s: dict[str, float] = {}
        self._supervisor = Supervisor(
            config.run.dir / "logs",
            extra_environment=collective_environment(
                config.ports.host,
                config.weights.deadline_s,
                deterministic=config.train.deterministic,
            ),
            inherited=(lock.descriptor,),
        )
        self._lock = lock
        self._view = LiveView(config, console)
        self._gpus = listed_gpus()
        self._device = device_of_host(self._gpus)
        # Of an earlier launcher, which has shown them.
        self._view.skip_rows()
        self._closing = ExitStack()
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # The view closes last, so that it still shows what the children wrote at their end.
            stack.enter_context(self._view)
            stack.enter_context(self._supervisor)
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._view.enter_phase("ending all processes of the run")
        self._closing.__exit__(kind, error, trace)
        self.wall_s["total"] = time.monotonic() - self._started

    @property
    def config_path(self) -> Path:
        """The resolved tree of the run."""
        return self.config.run.dir / "config.toml"

    def start(
        self, name: str, module: str, config_path: Path, arguments: Sequence[str] = (), *,
        outlives: str | None = None, restarts: RestartRule | None = None,
        gpus: range | None = None,
    ) -> None:  # fmt: skip
        """Start one Python process of the run.

        gpus: those that it sees, none of them on a host without any; None: it needs no device.
        """
        command = [sys.executable, "-m", module, "--config", str(config_path), *arguments]
        environment = role_environment("cpu" if gpus is None else self._device)
        if gpus:
            environment |= gpu_environment(gpus, self._gpus)
        self._supervisor.start(
            name, command, outlives=outlives, restarts=restarts, environment=environment
        )

    def start_ranks(self, name: str, module: str, arguments: list[str]) -> None:
        """Start the trainer ranks under torchrun."""
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(self.config.parallel.world_size)]
        command += ["--master-addr", self.config.ports.host]
        command += ["--master-port", str(self.config.ports.torchrun)]
        command += ["-m", module, "--config", str(self.config_path), *arguments]
        environment = ranks_environment(
            self._device,
            self.config.parallel.world_size,
            expandable_segments=self.config.has_expandable_segments,
            deterministic=self.config.train.deterministic,
        )
        self._supervisor.start(name, command, environment=environment)

    def start_metrics(self) -> None:
        """Start the process that passes metrics on, if anybody is to get them."""
        if self.config.metrics.is_on and not self._supervisor.is_running("metrics"):
            command = [sys.executable, "-m", "megatron_rl.observe.exporters.worker"]
            command += ["--config", str(self.config_path)]
            environment = role_environment("cpu")
            self._supervisor.start("metrics", command, environment=environment, is_expendable=True)

    def wait_for(self, name: str, what: str = "", limit_s: float | None = None) -> None:
        """Wait until the role has ended in good order.

        Without a limit the role's own deadlines bound it. Raises RoleDied when any role ends
        otherwise, DeadlineExceeded after limit_s.
        """
        started = time.monotonic()
        while self._supervisor.is_running(name):
            if limit_s is not None and time.monotonic() - started > limit_s:
                raise DeadlineExceeded(f"{what} has not ended after {limit_s:.0f} s")
            self._look()

    def end_serving(self) -> None:
        """Let the roles that the queue told to stop close, then end what is left."""
        deadline = time.monotonic() + _SERVING_END_S
        roles = self._supervisor.roles.values()
        while any(role.ended is None and not role.is_expendable for role in roles):
            if time.monotonic() > deadline:
                log.warning("a role did not end within %.0f s of the queue's end", _SERVING_END_S)
                break
            self._look()
        self._supervisor.stop()

    def _look(self) -> None:
        time.sleep(POLL_S)
        for restart in self._supervisor.check():
            write_restart(self.config.run.dir, self._view.last_step, restart)
        self._view.refresh(self._supervisor.roles)
        self._supervisor.end_silent(self._view.roster.missing)
        self._lock.heartbeat.check()

    def engine_gpus(self) -> dict[int, range]:
        """GPUs of each generator; {} on a host without any. Raises InputError."""
        return self._roles().engines

    def scorer_gpus(self) -> range:
        """GPUs of the scorer; none on a host without any. Raises InputError."""
        return self._roles().scorer

    def _roles(self) -> NodeRoles:
        if not self._gpus:
            return NodeRoles()
        return place(self.config, nodes=1, gpus_per_node=len(self._gpus))[0]

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Measure a phase and show its name."""
        started = time.monotonic()
        self._view.enter_phase(text)
        self._lock.heartbeat.phase = text
        yield
        self.wall_s[name] = time.monotonic() - started

    def hf_folder(self, name: str) -> Path:
        """Where the ranks export a model."""
        return self.config.run.dir / "hf" / name
