"""How a process inside the sandbox gives up its privileges before it runs untrusted code.

Loaded by `server.py` and called in a freshly forked child. Standard library alone: inside
the sandbox there is nothing else. The C library has no functions for most of these system calls, so
they are made by number (man 2 of each: prctl, seccomp, capset, landlock_create_ruleset).
"""

import ctypes
import math
import os
import resource
import signal
import struct
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
# These three have the same number on every architecture.
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
PENDING_SIGNALS = 1024
LEAST_LANDLOCK = 3
"""Version from which it is a wall: before, files that can merely be read can be truncated."""
_LANDLOCK_READ = 0b1101
"""Execute, read a file, list a folder."""
_LANDLOCK_FILE_RIGHTS = 0b111 | 1 << 14 | 1 << 15
"""Rights that make sense for files that are not folders: execute, write, read, truncate, ioctl."""

libc = ctypes.CDLL(None, use_errno=True)


class Confinement(NamedTuple):
    """What a child may use."""

    memory_bytes: int
    cpu_s: float
    file_bytes: int
    """Largest file, its output included."""
    processes: int
    """Processes and threads, those of the same user outside the sandbox included."""
    filter: bytes
    """Seccomp program; empty for none."""
    uid: int | None
    """User and group to become; None to stay."""
    landlock: int | None
    """Descriptor of a Landlock ruleset; None for none."""


# struct sock_fprog of linux/filter.h: how many instructions of 8 bytes each, and where they are.
class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def confine(confinement: Confinement, parent_pid: int) -> None:
    """Drop every privilege of this process for good; OSError when the kernel refuses.

    The order matters: each step needs what a later one takes away.
    """
    # The server ends the whole session by its number.
    os.setsid()
    os.umask(0o022)
    _limit(confinement)
    if confinement.uid is not None:
        # Groups first: a process that is no longer root cannot give them up.
        os.setgroups([])
        os.setresgid(confinement.uid, confinement.uid, confinement.uid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
    # After the change of user: the kernel then forgets the signal that a parent's death sends.
    die_with(parent_pid)
    # A set-user-id program gives nothing any more. Without this flag the kernel takes Landlock and
    # seccomp from privileged processes only.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if confinement.landlock is not None:
        _call(_SYS_LANDLOCK_RESTRICT_SELF, confinement.landlock, 0)
    drop_capabilities()
    # The filter is last, since it allows none of the calls above.
    if confinement.filter:
        program = _FilterProgram(len(confinement.filter) // 8, confinement.filter)
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call above sends no signal: then we are another's child by now.
    if os.getppid() != parent_pid:
        os._exit(1)


def become_reaper() -> None:
    """Have orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Give up all capabilities."""
    # Ambient ones would pass to the next program that is executed.
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is None:
        raise OSError(f"unknown machine {os.uname().machine}: expected one of {[*_SYS_CAPSET]}")
    # Of process 0 (this one): two times three empty words (effective, permitted, inheritable).
    _call(number, struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def mount_tmpfs(path: str, options: str) -> None:
    """Mount an empty file system of limited size; OSError on failure."""
    nosuid_nodev = 0b110
    _check(libc.mount(b"tmpfs", path.encode(), b"tmpfs", nosuid_nodev, options.encode()), path)


def remount_read_only(path: str) -> None:
    """Make a mounted file system read-only for everyone; OSError on failure."""
    remount_ro_nosuid_nodev = 0b100111
    # A remount sets all flags anew, so those of the mount are given again.
    _check(libc.mount(b"tmpfs", path.encode(), None, remount_ro_nosuid_nodev, None), path)


def unmount(path: str) -> None:
    """Detach a file system, whoever still uses it; OSError on failure."""
    detach = 2
    _check(libc.umount2(path.encode(), detach), path)


def landlock_version() -> int:
    """Version of Landlock that the kernel offers; 0 for none."""
    return max(0, libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, 1))


def landlock_rules(readable: list[str], writable: list[str]) -> int:
    """Descriptor of a ruleset that denies every other file and, if the kernel can, the network.

    Paths that do not exist are skipped. OSError when the kernel's Landlock is older than
    LEAST_LANDLOCK, or missing.
    """
    version = landlock_version()
    # A version knows so many rights of files, and refuses rulesets with others: 15 in the third,
    # then ioctl on devices (5). From 4 on it knows two rights of TCP (bind, connect), from 6 on two
    # scopes (abstract sockets, signals to others).
    files = (1 << (16 if version >= 5 else 15)) - 1
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", files, network, scopes)
    rules = _call(_SYS_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for paths, rights in ((readable, _LANDLOCK_READ), (writable, files)):
        for path in paths:
            _allow(rules, path, rights & files)
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        # The kernel refuses rights of folders (list, make, remove) on what is none.
        if not os.path.isdir(path):
            rights &= _LANDLOCK_FILE_RIGHTS
        _call(_SYS_LANDLOCK_ADD_RULE, rules, 1, struct.pack("<Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _limit(confinement: Confinement) -> None:
    # A last resort: the kernel counts this one in ticks, which on a crowded host run ahead of the
    # time that a program gets. The limit itself is kept from outside, by a precise clock.
    cpu_s = 2 * math.ceil(confinement.cpu_s) + 1
    limits = {
        # 1, not 0: the kernel starts a host's collector of cores even for 0, but never for 1.
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: confinement.memory_bytes,
        resource.RLIMIT_FSIZE: confinement.file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: confinement.processes,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # Timers count too. Nothing else caps them, and they are taken from all of the user's.
        resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,
        # The cap on memory is the cap on the stack too: deep recursion is legitimate.
        resource.RLIMIT_STACK: resource.RLIM_INFINITY,
    }
    for name, value in limits.items():
        # Only root may raise a hard limit, so a lower one that was inherited stays.
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
            value = hard
        # Both limits, as a program may raise its soft one. For RLIMIT_CPU the kernel then sends
        # SIGKILL at once instead of SIGXCPU, which a program may catch.
        resource.setrlimit(name, (value, value))


def _prctl(option: int, first: int, second: int = 0) -> None:
    # Arguments without a type would be passed as 32-bit ints, and prctl reads 64 bits of each.
    arguments = (ctypes.c_ulong(value) for value in (first, second, 0, 0))
    _check(libc.prctl(option, *arguments), f"prctl {option}")


def _call(number: int, *arguments: int | bytes) -> int:
    converted = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    return _check(libc.syscall(ctypes.c_long(number), *converted), f"system call {number}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
