"""Seccomp filters of system calls for untrusted programs.

A grading process builds them with libseccomp (through pyseccomp); the sandbox applies them. Both
filters list the allowed calls. Any other call fails with ENOSYS, as on an older kernel: C libraries
then use an older call, but give up after EPERM. A call by the numbers of another architecture
(i386, x32) ends the program.

A filter sees arguments of 64 bits; the kernel uses 32 of an int. Allowed values are compared in all
64 or the lower 32 bits, and refused bits are in the lower 32, so higher bits bypass nothing.

No allowed call may reach another process. Signals have more ways than `kill`: owner and signal of a
descriptor (fcntl, ioctl), timers of other threads (the kernel accepts only those of the same
process), the death of a parent (prctl, clone).
"""

import errno
import functools
import itertools
import tempfile

from verification.verdict import GradingError

# Bits that the kernel uses of an int argument.
_INT = 0xFFFFFFFF
_CLONE_THREAD = 0x00010000
_CLONE_PARENT = 0x00008000
# The lowest byte of clone's flags is the signal at the child's end.
_CLONE_SIGNAL = 0xFF
_SIGCHLD = 17
# CLONE_NEWTIME .. CLONE_NEWNET: every flag that makes a namespace.
_CLONE_NAMESPACES = 0x7E020080
_AF_UNIX = 1
# isatty, window size, close-on-exec, non-blocking, bytes available: nothing that types or signals.
_IOCTLS = (0x5401, 0x5413, 0x5450, 0x5451, 0x5421, 0x541B)
# Name of a thread or of a mapping, dumpable flag, capability of the bounding set.
_PRCTLS = (15, 16, 0x53564D41, 3, 23)
# Copies of a descriptor, flags, locks (process, open file), size of a pipe, seals: no owner or
# signal of a descriptor, no lease, no notification, no growing of pipes.
_FCNTLS = (0, 1030, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1032, 1034)
_F_SETFL = 4
_O_ASYNC = 0x2000
# Wait, wake, requeue, with and without bits. No priority inheritance: its futex names a thread of
# any process.
_FUTEXES = (0, 1, 3, 4, 5, 9, 10)
_FUTEX_PRIVATE_AND_CLOCK = 0x180
# All named clocks; a negative number is the clock of a process or device.
_CLOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 11)
_CLOCK_CALLS = ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")

_FILES = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek open openat creat
    close close_range stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
    readlink readlinkat getdents getdents64 getcwd chdir fchdir dup dup2 dup3 ftruncate truncate
    fallocate unlink unlinkat mkdir mkdirat rmdir rename renameat renameat2
    symlink symlinkat link linkat umask
    sendfile copy_file_range fadvise64 pipe pipe2 eventfd eventfd2 epoll_create epoll_create1
    epoll_ctl epoll_wait epoll_pwait epoll_pwait2 poll ppoll select pselect6 timerfd_create
    timerfd_settime timerfd_gettime recvfrom recvmsg shutdown
"""
_MEMORY = "mmap munmap mprotect mremap madvise brk mincore"
_TIME = """
    pause alarm setitimer getitimer nanosleep gettimeofday time times
    timer_settime timer_gettime timer_delete timer_getoverrun
"""
_PROCESS = """
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigpending sigaltstack
    restart_syscall set_robust_list set_tid_address rseq membarrier sched_yield
    sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
    sched_get_priority_min getpriority getpid gettid getppid getuid geteuid getgid getegid
    getresuid getresgid getgroups getpgrp getpgid getsid getrusage uname sysinfo getrlimit setrlimit
    getcpu getrandom arch_prctl exit exit_group execve wait4 waitid
"""
# clone3 is missing on purpose: its flags are in memory, which a filter cannot read. Without it the
# C library uses clone, which takes its flags as an argument.
_COMMON = f"{_FILES} {_MEMORY} {_TIME} {_PROCESS}".split()
# Refused with EPERM: the program gets the error and continues.
_SIGNALS = ("kill", "tkill", "tgkill")
# Succeed without effect: nothing here must survive a crash of the host, and a program could
# otherwise keep the disk busy through any readable file.
_SYNCHRONIZATIONS = ("fsync", "fdatasync", "msync")
# Landlock has no right for these calls: under Landlock alone they would change the host's files.
_TIMES = ("utime", "utimes", "utimensat", "futimesat")


@functools.cache
def test_filter() -> bytes:
    """Filter for a program under test: threads, but no other process, socket or signal.

    Without forks RLIMIT_AS caps all memory. abort() still ends the program: the filter refuses its
    signal, and the C library then executes an invalid instruction.
    """
    return _build(may_fork=False)


@functools.cache
def compile_filter(*, may_change_modes: bool) -> bytes:
    """Filter for a compiler, which starts other programs and makes an executable.

    Where it may not change modes, chmod succeeds without effect: a linker does not check.
    """
    return _build(may_fork=True, may_change_modes=may_change_modes)


def _build(*, may_fork: bool, may_change_modes: bool = False) -> bytes:
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise GradingError(
            f"no seccomp filter can be built ({error}): install pyseccomp and the system library "
            "libseccomp2, or accept unsafe grading with isolation = 'rlimits'"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    # The default action ends only one thread.
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    for name in _COMMON:
        _add(rules, pyseccomp.ALLOW, name)
    for name in (*_SIGNALS, *_TIMES):
        _add(rules, pyseccomp.ERRNO(errno.EPERM), name)
    for name in _SYNCHRONIZATIONS:
        _add(rules, pyseccomp.ERRNO(0), name)
    _add_conditional(rules, pyseccomp)
    arg, masked = pyseccomp.Arg, pyseccomp.MASKED_EQ
    # CLONE_THREAD makes a thread of this process, which shares its limits and its end.
    mask = _CLONE_NAMESPACES | _CLONE_THREAD
    _add(rules, pyseccomp.ALLOW, "clone", arg(0, masked, mask, _CLONE_THREAD))
    if may_fork:
        for name in ("fork", "vfork"):
            _add(rules, pyseccomp.ALLOW, name)
        for name in ("chmod", "fchmod", "fchmodat"):
            _add(rules, pyseccomp.ALLOW if may_change_modes else pyseccomp.ERRNO(0), name)
        # A child of the caller only, with the usual signal at its end.
        mask |= _CLONE_PARENT | _CLONE_SIGNAL
        _add(rules, pyseccomp.ALLOW, "clone", arg(0, masked, mask, _SIGCHLD))
    else:
        _add(rules, pyseccomp.ERRNO(errno.EPERM), "fork")
        _add(rules, pyseccomp.ERRNO(errno.EPERM), "vfork")
    # Export, because the filter is for another process; libseccomp exports only to files.
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _add_conditional(rules: object, pyseccomp: object) -> None:
    """Add calls that are allowed for some arguments."""
    arg, equal = pyseccomp.Arg, pyseccomp.EQ
    for request in _IOCTLS:
        _add(rules, pyseccomp.ALLOW, "ioctl", arg(1, equal, request))
    for command in _FCNTLS:
        _add(rules, pyseccomp.ALLOW, "fcntl", arg(1, equal, command))
    flags = arg(2, pyseccomp.MASKED_EQ, _O_ASYNC, 0)
    _add(rules, pyseccomp.ALLOW, "fcntl", arg(1, equal, _F_SETFL), flags)
    mask = _INT & ~_FUTEX_PRIVATE_AND_CLOCK
    for operation in _FUTEXES:
        _add(rules, pyseccomp.ALLOW, "futex", arg(1, pyseccomp.MASKED_EQ, mask, operation))
    for name, clock in itertools.product(_CLOCK_CALLS, _CLOCKS):
        _add(rules, pyseccomp.ALLOW, name, arg(0, pyseccomp.MASKED_EQ, _INT, clock))
    for option in _PRCTLS:
        _add(rules, pyseccomp.ALLOW, "prctl", arg(0, equal, option))
    # Process 0 is the caller; another number would reach another process.
    _add(rules, pyseccomp.ALLOW, "prlimit64", arg(0, equal, 0))
    _add(rules, pyseccomp.ALLOW, "socketpair", arg(0, equal, _AF_UNIX))
    # Argument 4 is the address: with one, a datagram could reach sockets of the host.
    _add(rules, pyseccomp.ALLOW, "sendto", arg(4, equal, 0))


def _add(rules: object, action: int, name: str, *conditions: object) -> None:
    import pyseccomp

    # Some architectures lack some calls: aarch64 has openat but no open.
    try:
        is_known = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) != -1
    except ValueError:
        is_known = False
    if is_known:
        rules.add_rule(action, name, *conditions)
