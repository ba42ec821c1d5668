"""A control group (version 1 or 2) for the sandboxes of one grading process, where permitted.

A second defence behind the limits per process: it caps memory (temporary files included) and the
number of processes of a whole sandbox.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_PREFIX = "megatron_rl_sandbox_"


class ControlGroup:
    """A control group with limits."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def remove(self) -> None:
        """Remove the group if it is empty."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children start in it."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))


def make_control_group(*, memory_bytes: int, processes: int) -> ControlGroup | None:
    """A group with limits; None where the kernel does not allow one."""
    name = f"{_PREFIX}{os.getpid()}"
    for parents, limits in _candidates(memory_bytes, processes):
        folders = [parent / name for parent in parents]
        for parent in parents:
            _remove_stale(parent)
        try:
            for folder in folders:
                folder.mkdir(exist_ok=True)
            for file, value in limits:
                next(f for f in folders if (f / file).exists()).joinpath(file).write_text(value)
        except (OSError, StopIteration):
            ControlGroup(folders).remove()
            continue
        return ControlGroup(folders)
    return None


def _candidates(
    memory_bytes: int, processes: int
) -> Iterator[tuple[list[Path], list[tuple[str, str]]]]:
    """Parent folders for groups, and (file, value) of their limits."""
    own = _own_groups()
    if "memory" in own and "pids" in own:
        limits = [("memory.limit_in_bytes", str(memory_bytes)), ("pids.max", str(processes))]
        yield [own["memory"], own["pids"]], limits
    if "" in own:
        limits = [("memory.max", str(memory_bytes)), ("pids.max", str(processes))]
        yield [own[""]], limits


def _own_groups() -> dict[str, Path]:
    """Folder of this process's group by controller; the key of version 2 is ""."""
    groups = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                folder = _MOUNT / controller / path.lstrip("/")
                if folder.is_dir() and os.access(folder, os.W_OK):
                    groups[controller] = folder
    return groups


def remove_stale_groups() -> bool:
    """Remove groups of killed grading processes; whether none is left."""
    parents = _own_groups().values()
    return all([_remove_stale(parent) for parent in parents])


def _remove_stale(parent: Path) -> bool:
    """Remove groups of dead processes; False while a group's last processes are still dying."""
    is_clean = True
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX)
        if not os.path.exists(f"/proc/{pid}"):
            try:
                folder.rmdir()
            except OSError:
                is_clean = False
    return is_clean
