"""Memory that this host gives to the processes of a run, and kills for lack of it.

Used by the launcher and `megatron-rl doctor`. Memory cgroups have limits (a job of SLURM, a
container), of version 1 or 2; what cannot be read counts as no limit and no kill.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_SIGKILL = 9
_NO_LIMIT_BYTES = 1 << 60
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_KILLS = ("memory.events", "memory.oom_control")


class Kills(NamedTuple):
    """Processes that the kernel has killed for lack of memory."""

    in_cgroup: int
    """In this process's cgroup, and those above it that have a limit."""
    on_host: int
    """Since its boot, also in cgroups of others."""


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The host's memory, or the lowest limit of this process's cgroups. root: of the system."""
    limits = [limit for folder in _cgroups(root) if (limit := _limit(folder)) is not None]
    return min([psutil.virtual_memory().total, *limits])


def count_kills(root: Path = Path("/")) -> Kills:
    """The kills so far. root: of the system."""
    counted = [
        _value(folder / name, "oom_kill")
        for number, folder in enumerate(_cgroups(root))
        if number == 0 or _limit(folder) is not None
        for name in _KILLS
    ]
    return Kills(max(counted, default=0), _value(root / "proc/vmstat", "oom_kill"))


def describe_kills(before: Kills, now: Kills, exit_code: int) -> str:
    """What lack of memory may have to do with the death of a role; "" for nothing.

    before: when the run began. exit_code: -N for signal N.
    """
    fix = "give the run more memory, or fewer engines and workers"
    if (count := now.in_cgroup - before.in_cgroup) > 0:
        limit = memory_limit_bytes() / 1e9
        return (
            f"the kernel killed {count} processes of this job for lack of memory, of which it has "
            f"{limit:.3g} GB: {fix}"
        )
    count = now.on_host - before.on_host
    if exit_code != -_SIGKILL or count <= 0:
        return ""
    return f"the kernel killed {count} processes of this host for lack of memory: {fix}"


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's memory cgroups, the innermost first."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = base / "memory" if controllers else base
        inner = Path(path.lstrip("/"))
        for part in (inner, *inner.parents):
            if (top / part).is_dir():
                yield top / part


def _limit(folder: Path) -> int | None:
    for name in _LIMITS:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
            return int(text)
    return None


def _value(path: Path, name: str) -> int:
    """A number of a file with a name and a number in each line; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines)
    return next((int(words[1]) for words in found if words[:1] == [name]), 0)
