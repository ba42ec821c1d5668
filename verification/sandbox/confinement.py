"""Drops the privileges of a process inside the sandbox before it runs untrusted code.

Called in a freshly forked child of `server.py`. Uses only the standard library, because the sandbox
has nothing else. The C library lacks most of these system calls, so they are called by number (man
2 prctl, seccomp, capset, landlock_create_ruleset).
"""

import ctypes
import math
import os
import resource
import signal
import struct
from collections.abc import Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
# Landlock's numbers are the same on every architecture.
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
PENDING_SIGNALS = 1024
LEAST_LANDLOCK = 3
"""Earlier versions let a program truncate files that it may only read."""
_LANDLOCK_READ = 0b1101
"""Execute, read a file, list a folder."""
_LANDLOCK_FILE_RIGHTS = 0b111 | 1 << 14 | 1 << 15
"""Rights of files that are not folders: execute, write, read, truncate, ioctl."""

libc = ctypes.CDLL(None, use_errno=True)


# struct sock_fprog of linux/filter.h: number and address of instructions of 8 bytes each.
class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def confine(
    limits: Mapping[str, Any],
    *,
    syscalls: bytes,
    uid: int | None,
    landlock: int | None,
    parent_pid: int,
) -> None:
    """Drop every privilege of this process for good. Raises OSError when the kernel refuses.

    limits: memory_bytes, cpu_s, file_bytes (of the largest file, output included), and processes
    (and threads, those of the same user outside the sandbox included). syscalls: seccomp program;
    empty for none. uid: user and group to become; None to stay. landlock: descriptor of a ruleset;
    None for none. The order matters: each step needs a right that a later step drops.
    """
    # The server ends the whole session by its number.
    os.setsid()
    os.umask(0o022)
    _limit(limits)
    if uid is not None:
        # Groups first: only root can drop them.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # After the change of user, which clears the parent-death signal.
    die_with(parent_pid)
    # Set-user-id programs gain nothing. Without this flag the kernel accepts Landlock and seccomp
    # from privileged processes only.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if landlock is not None:
        _call(_SYS_LANDLOCK_RESTRICT_SELF, landlock, 0)
    drop_capabilities()
    # The filter comes last: it allows none of the calls above.
    if syscalls:
        program = _FilterProgram(len(syscalls) // 8, syscalls)
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call above sends no signal: another process is the parent then.
    if os.getppid() != parent_pid:
        os._exit(1)


def become_reaper() -> None:
    """Have orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Give up all capabilities."""
    # Ambient capabilities would pass to the next executed program.
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is None:
        raise OSError(f"unknown machine {os.uname().machine}: expected one of {[*_SYS_CAPSET]}")
    # Process 0 is this one; 2 x 3 empty words (effective, permitted, inheritable).
    _call(number, struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def mount_tmpfs(path: str, options: str) -> None:
    """Mount an empty file system of limited size. Raises OSError."""
    nosuid_nodev = 0b110
    _check(libc.mount(b"tmpfs", path.encode(), b"tmpfs", nosuid_nodev, options.encode()), path)


def remount_read_only(path: str) -> None:
    """Make a mounted file system read-only for everyone. Raises OSError."""
    remount_ro_nosuid_nodev = 0b100111
    # A remount resets all flags, so the mount's flags are repeated.
    _check(libc.mount(b"tmpfs", path.encode(), None, remount_ro_nosuid_nodev, None), path)


def unmount(path: str) -> None:
    """Detach a file system even if it is in use. Raises OSError."""
    detach = 2
    _check(libc.umount2(path.encode(), detach), path)


def landlock_version() -> int:
    """The kernel's Landlock version; 0 for none."""
    return max(0, libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, 1))


def landlock_rules(readable: list[str], writable: list[str]) -> int:
    """Descriptor of a ruleset that denies every other file and, if the kernel can, the network.

    Skips paths that do not exist. Raises OSError when Landlock is missing or older than
    LEAST_LANDLOCK.
    """
    version = landlock_version()
    # A version refuses rulesets with rights that it does not know. Version 3 has 15 file rights, 5
    # adds ioctl on devices; 4 adds two TCP rights (bind, connect), 6 two scopes (abstract sockets,
    # signals to others).
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
        # The kernel refuses folder rights (list, make, remove) on other files.
        if not os.path.isdir(path):
            rights &= _LANDLOCK_FILE_RIGHTS
        _call(_SYS_LANDLOCK_ADD_RULE, rules, 1, struct.pack("<Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _limit(allowed: Mapping[str, Any]) -> None:
    # A last resort: the kernel counts this limit in ticks, which run ahead on a busy host. The
    # grading process enforces the real limit with a precise clock.
    cpu_s = 2 * math.ceil(allowed["cpu_s"]) + 1
    limits = {
        # 1, not 0: the kernel starts the host's core collector for 0, but never for 1.
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: allowed["memory_bytes"],
        resource.RLIMIT_FSIZE: allowed["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: allowed["processes"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        # Also caps timers, which nothing else does, and which count for the whole user.
        resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,
        # The memory cap also caps the stack: deep recursion is legitimate.
        resource.RLIMIT_STACK: resource.RLIM_INFINITY,
    }
    for name, value in limits.items():
        # Only root may raise a hard limit, so a lower inherited limit stays.
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
            value = hard
        # Both limits, because a program may raise its soft limit. For RLIMIT_CPU the kernel then
        # sends SIGKILL at once instead of SIGXCPU, which a program may catch.
        resource.setrlimit(name, (value, value))


def _prctl(option: int, first: int, second: int = 0) -> None:
    # ctypes passes untyped arguments as 32-bit ints; prctl reads 64 bits of each.
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
