"""Finds and kills the processes below the launcher, also those whose parent died.

Used by `supervisor.py`, in the launcher's one thread. The launcher must be a child subreaper: a
process whose parent died becomes a child of the launcher instead of escaping.
"""

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable, Collection

import psutil

KILL_GRACE_S = 3.0
_KILL_ROUND_S = 0.2
_LOOK_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36

log = logging.getLogger(__name__)


def set_subreaper(is_on: bool) -> None:
    """Become (or no longer be) the parent of descendants whose parent died."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def find_orphans(
    not_ours: Collection[psutil.Process], role_pids: Collection[int]
) -> list[psutil.Process]:
    """Live processes of roles whose parent died, and all processes below them.

    Live processes of a run keep their children, so any other child of the launcher is an orphan.
    """
    found: list[psutil.Process] = []
    for process in find_live(psutil.Process().children(), not_ours, role_pids):
        if process.pid in role_pids:
            continue
        try:
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def find_live(
    processes: list[psutil.Process],
    not_ours: Collection[psutil.Process],
    role_pids: Collection[int],
) -> list[psutil.Process]:
    """Live ones of `processes`, without `not_ours`; reaps orphans that ended, but no role."""
    found = []
    for process in processes:
        if process in not_ours:
            continue
        if not _is_zombie(process):
            found.append(process)
        elif process.pid not in role_pids:
            _reap(process.pid)
    return found


def wait_for_none(
    find: Callable[[], list[psutil.Process]],
    timeout_s: float,
    *,
    unless: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until `find` finds nothing; False after timeout_s, or when `unless` holds."""
    deadline = time.monotonic() + timeout_s
    while find():
        if time.monotonic() > deadline or unless():
            return False
        time.sleep(_LOOK_S)
    return True


def kill_all(find: Callable[[], list[psutil.Process]], why: str) -> list[psutil.Process]:
    """SIGKILL all processes of `find`, repeatedly; returns those alive after KILL_GRACE_S."""
    deadline = time.monotonic() + KILL_GRACE_S
    # Repeated, because a process may fork between `find` and the kill.
    while (alive := find()) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                log.info("killing %s, pid %d: %s", process.name(), process.pid, why)
                process.kill()
        wait_for_none(find, _KILL_ROUND_S)
    if alive:
        log.error("could not kill pids %s", [process.pid for process in alive])
    return alive


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def reap_orphans(role_pids: Collection[int]) -> None:
    """Reap all children that have ended, except roles.

    A sandbox leaves a zombie for each program that it ends. Zombies count as processes of the
    sandbox's group, which is limited to a few hundred.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        # An ended role hides other children until the supervisor polls it.
        if found is None or found.si_pid in role_pids:
            return
        _reap(found.si_pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
