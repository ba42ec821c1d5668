"""Starts the processes of a run, restarts those that may die, and ends them all together.

Used by `node.py`, in one thread. Every child leads a process group, so that Ctrl-C at the terminal
reaches only the launcher; Linux ends it with the launcher. While a Supervisor is open, the launcher
is a child subreaper, so `stop` finds every descendant. A role restarts when none of it is left.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import psutil

import megatron_rl
from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.launcher.process_tree import (
    find_live,
    find_orphans,
    kill_all,
    reap_orphans,
    set_subreaper,
    wait_for_none,
)
from megatron_rl.launcher.restarts import (
    Answer,
    Death,
    Replicas,
    RestartRule,
    answer_death,
    pause_before,
)
from megatron_rl.launcher.role import Role
from megatron_rl.launcher.stopped import StoppedProcesses
from megatron_rl.observe.deaths import RoleDied, RunFailed, explain_death, how_it_ended
from megatron_rl.observe.host_memory import Kills, count_kills, describe_kills
from megatron_rl.protocol.disk_room import disk_fault
from megatron_rl.protocol.failure import FAILURE_VARIABLE, FAILURES, clear_failures, first_failure
from megatron_rl.protocol.node_messages import RoleRestart
from megatron_rl.protocol.process import ENDING_SIGNALS, READY_FILE_VARIABLE, RESTARTED_VARIABLE
from megatron_rl.protocol.wire import WireError

POLL_S = 0.2

log = logging.getLogger(__name__)


@dataclass
class Supervisor:
    """Owner of all children; a context manager that leaves none behind.

    Once a role has started, refused input and a failed disk leave the context as RunFailed.
    """

    log_dir: Path
    extra_environment: dict[str, str] = field(default_factory=dict)
    """Variables of all children."""
    early_end_grace_s: float = 30.0
    """A role may end this long before the role that it must outlive."""
    silence_s: float = 60.0
    """A role is killed this long after the queue misses it (expert.queue.heartbeat_timeout_s)."""
    stopped_s: float = 30.0
    """A role is killed when one of its processes has been stopped for this long."""
    term_grace_s: float = 6.0
    """Time for the roles to end after SIGTERM."""
    first_pause_s: float = 1.0
    """Pause before the first restart of a role; doubles for each further one."""
    inherited: tuple[int, ...] = ()
    """File descriptors for all children."""
    roles: dict[str, Role] = field(default_factory=dict)
    replicas: Replicas = field(default_factory=Replicas)
    """Over all phases."""
    _has_started: bool = False
    """Whether a role has started; afterwards refused input is a failure."""
    _stopped: StoppedProcesses = field(init=False)
    _not_ours: set[psutil.Process] = field(default_factory=set)
    _opened_s: float = 0.0
    """time.time() of its opening; failure notes from before belong to another run."""
    _kills: Kills = field(default_factory=count_kills)
    """For lack of memory, before the last death that was explained."""

    def __enter__(self) -> Self:
        set_subreaper(True)
        self._stopped = StoppedProcesses(self.stopped_s)
        self._opened_s = time.time()
        self._not_ours = set(psutil.Process().children(recursive=True))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.stop()
        finally:
            set_subreaper(False)
        if isinstance(error, OSError):
            error = disk_fault(error, self.log_dir)
        if self._has_started and isinstance(error, ConfigError | InputError | WireError):
            raise RunFailed(str(error)) from error

    def start(
        self, name: str, command: list[str], *,
        outlives: str | None = None, restarts: RestartRule | None = None,
        environment: Mapping[str, str] = MappingProxyType({}), is_expendable: bool = False,
    ) -> Role:  # fmt: skip
        """Start a child; appends its stdout and stderr to `log_dir/<name>.out`."""
        log_path = self.log_dir / f"{name}.out"
        told = {FAILURE_VARIABLE: str(self.log_dir.absolute() / FAILURES / name)}
        if restarts is not None:
            told[READY_FILE_VARIABLE] = str(restarts.ready_path)
            restarts.ready_path.unlink(missing_ok=True)
            self.replicas.take_back(restarts)
        clear_failures(self.log_dir / FAILURES, name)
        with log_path.open("ab") as out:
            log_start = out.tell()
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child_environment(), **self.extra_environment, **environment}
                | told,
                process_group=0,
                pass_fds=self.inherited,
            )
        self._has_started = True
        role = Role(
            name, command, process, log_path, log_start, time.monotonic(), outlives, restarts,
            is_expendable, environment,
        )  # fmt: skip
        self.roles[name] = role
        log.info("started %s, pid %d: %s", name, process.pid, " ".join(command))
        return role

    def check(self) -> list[RoleRestart]:
        """Note ended roles and restart those whose pause is over; returns the restarts.

        Raises RoleDied for a role whose death ends the run.
        """
        now = time.monotonic()
        self._kill_stopped(now)
        for role in self.roles.values():
            if role.ended is None and role.process.poll() is not None:
                role.ended = now
                log.info("%s ended with exit code %d", role.name, role.exit_code)
        reap_orphans(self._role_pids())
        for role in self.roles.values():
            is_dead = role.exit_code not in (None, 0) or self._ended_early(role, now)
            if is_dead and not role.is_death_answered:
                self._answer_death(role, now)
        due = [r for r in self.roles.values() if r.restart_at is not None and now >= r.restart_at]
        return [restart for role in due if (restart := self._restart(role)) is not None]

    def _kill_stopped(self, now: float) -> None:
        """Kill roles with a process that a signal stopped; their death is answered as any other."""
        running = {role.process.pid: role for role in self.roles.values() if role.ended is None}
        found = self._stopped.find({pid: role.generations for pid, role in running.items()}, now)
        for pid, (stopped, what, seconds) in found.items():
            what = "its first process" if stopped == pid else what
            self.kill(
                running[pid], f"{what} (pid {stopped}) was stopped by SIGSTOP for {seconds:.0f} s"
            )

    def kill(self, role: Role, why: str) -> None:
        """Kill a role that hangs, or is to start again; `check` answers its death."""
        role.why_killed = why
        log.warning("killing %s: %s", role.name, why)
        role.process.kill()

    def _ended_early(self, role: Role, now: float) -> bool:
        if role.ended is None or role.outlives not in self.roles:
            return False
        return self.roles[role.outlives].ended is None and now - role.ended > self.early_end_grace_s

    def _has_ended_well(self, name: str | None) -> bool:
        return name in self.roles and self.roles[name].exit_code == 0

    def _answer_death(self, role: Role, now: float) -> None:
        """Plan a restart or continue without the role. Raises RoleDied if the run must end."""
        rule = role.restarts
        if role.is_expendable:
            role.is_death_answered = True
            log.warning("%s; the run continues without it", self._explain(role))
            clear_failures(self.log_dir / FAILURES, role.name)
            return
        if rule is None:
            raise self._explain(role)
        if rule.is_shared:
            role.is_death_answered, role.death = True, self._explain(role)
            self._end_all_of(role)
            return
        answer, remark = answer_death(self._death_of(role, rule, now), rule)
        if answer is Answer.END_RUN:
            raise self._explain(role, remark)
        role.is_death_answered = True
        if answer is Answer.RESTART:
            pause_s = pause_before(self.replicas.restarts(rule, now), self.first_pause_s)
            role.restart_at = now + pause_s
            remark = f"to be restarted in {pause_s:.0f} s"
        else:
            role.is_given_up = True
            again_at = self.replicas.give_up(rule)
            role.restart_at = again_at if answer is Answer.GIVE_UP else None
        log.warning("%s", self._explain(role, remark))
        # The run continues, so this failure must not explain a later one.
        clear_failures(self.log_dir / FAILURES, role.name)
        self._end_orphans(role)

    def _death_of(self, role: Role, rule: RestartRule, now: float) -> Death:
        same = [other for other in self.roles.values() if other.kind == rule.kind]
        if any(other.is_ready for other in same) or rule.ready_path.exists():
            self.replicas.note_ready(rule.kind)
        starting = [other for other in same if other.ended is None and not other.is_restarted]
        return Death(
            exit_code=role.ending.code,
            can_start=self.replicas.can_start(rule, len(starting), len(same)),
            restarts=self.replicas.restarts(rule, now),
            is_run_ending=self._has_ended_well(role.outlives) or role.is_done,
            is_too_late=self._has_ended_well(rule.until),
            others=self.replicas.others(rule),
        )

    def _explain(self, role: Role, remark: str = "") -> RoleDied:
        remark = "; ".join(filter(None, [role.why_killed, remark]))
        first = first_failure(self.log_dir / FAILURES, self._opened_s)
        before, self._kills = self._kills, count_kills()
        memory = partial(describe_kills, before, self._kills)
        return explain_death(role.ending, first, remark, memory)

    def _end_orphans(self, role: Role) -> list[psutil.Process]:
        """Kill orphans of dead roles, which hold ports and memory."""
        return kill_all(
            lambda: find_orphans(self._not_ours, self._role_pids()), f"an orphan of {role.name}"
        )

    def _end_all_of(self, role: Role) -> None:
        """Kill what a dead role has left. Raises RoleDied if a process cannot be killed."""
        if left := self._end_orphans(role):
            pids = [process.pid for process in left]
            raise self._explain(role, f"not restarted, because its pids {pids} could not be killed")

    def _restart(self, role: Role) -> RoleRestart | None:
        """Restart a role; None if the restart became pointless during the pause."""
        rule = role.restarts
        assert rule is not None and role.exit_code is not None
        if self._has_ended_well(rule.until) or self._has_ended_well(role.outlives):
            role.restart_at, role.is_death_answered = None, False  # answered again
            return None
        self._end_all_of(role)
        if rule.ready_path.exists():
            self.replicas.note_ready(rule.kind)
        count = self.replicas.note_restart(rule, time.monotonic())
        self.start_again(role, f"restart {count} of {rule.limit}")
        why = role.why_killed
        return RoleRestart(role.name, rule.kind, role.exit_code, count, rule.limit, why=why)

    def start_again(self, role: Role, remark: str) -> None:
        """Start a role that has ended with the same command; remark: for its log."""
        assert role.exit_code is not None
        # A full disk keeps no role from its restart.
        with contextlib.suppress(OSError), role.log_path.open("a") as out:
            out.write(f"--- ended with {how_it_ended(role.exit_code)}; {remark} ---\n")
        new = self.start(
            role.name, role.command, outlives=role.outlives, restarts=role.restarts,
            environment={**role.environment, RESTARTED_VARIABLE: "1"},
        )  # fmt: skip
        new.is_restarted = True

    def end_silent(self, missing: Collection[str]) -> None:
        """Kill hanging roles: ready ones that the queue has missed for silence_s.

        missing: replicas that the queue misses now. `check` restarts the killed roles.
        """
        now = time.monotonic()
        for role in self.roles.values():
            if not role.is_ready or role.restarts is None or role.restarts.replica not in missing:
                role.silent_since = None
            elif role.silent_since is None:
                role.silent_since = now
            elif now - role.silent_since > self.silence_s and role.ended is None:
                self.kill(
                    role,
                    f"it hangs: the queue has not heard it for {now - role.silent_since:.0f} s",
                )

    def end(self, kind: str) -> None:
        """Ask the roles of a kind to end, by SIGTERM, which is their ordinary end."""
        for role in self.roles.values():
            if role.kind == kind and role.process.poll() is None:
                role.process.terminate()

    def is_running(self, name: str) -> bool:
        """Whether the role was started and has no noted end, or is about to be restarted."""
        role = self.roles.get(name)
        if role is None:
            return False
        return role.ended is None or (role.restart_at is not None and not role.is_given_up)

    def stop(self) -> None:
        """End every descendant: SIGTERM to the roles, after term_grace_s SIGKILL to all.

        A second signal to the launcher sends SIGKILL at once. Afterwards `start` works again.
        """
        arrived: list[int] = []

        def note(number: int, frame: object) -> None:
            arrived.append(number)

        handlers = {number: signal.signal(number, note) for number in ENDING_SIGNALS}
        try:
            for role in self.roles.values():
                if role.process.poll() is None:
                    role.process.terminate()
            if not wait_for_none(self.descendants, self.term_grace_s, unless=lambda: bool(arrived)):
                kill_all(self.descendants, "a second signal" if arrived else "SIGTERM was ignored")
            self.roles.clear()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def descendants(self) -> list[psutil.Process]:
        """Live processes below this one that started after the Supervisor was opened."""
        for role in self.roles.values():
            role.process.poll()
        children = psutil.Process().children(recursive=True)
        return find_live(children, self._not_ours, self._role_pids())

    def _role_pids(self) -> set[int]:
        return {role.process.pid for role in self.roles.values()}


def child_environment() -> dict[str, str]:
    """Environment variables of every child."""
    root = str(Path(megatron_rl.__file__).resolve().parent.parent)
    return {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Asks `process.run_main` to end the process with the one that started it.
        "MEGATRON_RL_LAUNCHED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }
