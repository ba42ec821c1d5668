"""System calls by number that a tested program must not be able to make.

Each program prints ESCAPED if the kernel itself answered, be it with an error: the filter alone
says ENOSYS (or EPERM where `REFUSED_WITH_EPERM` says so), and does so whatever the arguments are.
"""

PRELUDE = """
import ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, struct, sys, threading, time
facts = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
buffer = ctypes.create_string_buffer(4096)
HIGH = 1 << 32
def escaped(why=""):
    print("ESCAPED", why, flush=True)
    raise SystemExit
def raw(name, *arguments):
    # What is no number is a buffer, and goes as its address.
    numbers = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(facts["numbers"][name]), *numbers)
    return result if result >= 0 else -ctypes.get_errno()
def attempt(name, *arguments, expected=errno.ENOSYS):
    result = raw(name, *arguments)
    if result != -expected: escaped(f"{name}{arguments}: {result}")
def quietly(function, *arguments):
    try: return function(*arguments)
    except (OSError, ValueError): return None
"""

REFUSED_WITH_EPERM = ("kill", "tkill", "tgkill", "fork", "vfork", "utime", "utimes", "utimensat",
                      "futimesat")  # fmt: skip

# Name -> arguments with which the call would do harm, or at least get past its first checks.
_REFUSED = {
    # Other processes.
    "kill": "parent, 9", "tkill": "parent, 9", "tgkill": "parent, parent, 9",
    "rt_sigqueueinfo": "parent, 9, buffer", "rt_tgsigqueueinfo": "parent, parent, 9, buffer",
    "pidfd_open": "parent, 0", "pidfd_send_signal": "0, 9, 0, 0", "pidfd_getfd": "0, 0, 0",
    "ptrace": "0x4206, parent, 0, 0", "process_vm_readv": "parent, buffer, 1, buffer, 1, 0",
    "process_vm_writev": "parent, buffer, 1, buffer, 1, 0", "process_mrelease": "0, 0",
    "process_madvise": "0, buffer, 1, 4, 0", "kcmp": "os.getpid(), parent, 0, 0, 0",
    "get_robust_list": "parent, buffer, buffer", "move_pages": "parent, 0, 0, 0, 0, 0",
    "migrate_pages": "parent, 64, buffer, buffer", "sched_setaffinity": "parent, 8, b'\\1' * 8",
    "sched_setscheduler": "parent, 5, buffer", "sched_setparam": "parent, buffer",
    "sched_setattr": "parent, buffer, 0", "setpriority": "0, parent, 19",
    "ioprio_set": "1, parent, 0", "setpgid": "0, 0", "setsid": "",
    # Processes, namespaces, users.
    "fork": "", "vfork": "", "clone3": "buffer, 88", "execveat": "0, b'', 0, 0, 0x1000",
    "unshare": "0x10000000", "setns": "0, 0", "setuid": "65534", "setgid": "65534",
    "setreuid": "-1, -1", "setresuid": "-1, -1, -1", "setfsuid": "0", "setgroups": "0, 0",
    "capset": "buffer, buffer", "seccomp": "0, 0, 0", "landlock_create_ruleset": "0, 0, 1",
    "landlock_restrict_self": "0, 0",
    # Files and mounts.
    "memfd_create": "b'x', 0", "memfd_secret": "0", "mknod": "b'x', 0o10666, 0",
    "mknodat": "-100, b'x', 0o10666, 0", "chmod": "b'.', 0o777", "fchmod": "1, 0o777",
    "fchmodat": "-100, b'.', 0o777", "fchmodat2": "-100, b'.', 0o777, 0",
    "chown": "b'.', -1, -1", "lchown": "b'.', -1, -1", "fchown": "1, -1, -1",
    "fchownat": "-100, b'.', -1, -1, 0", "setxattr": "b'.', b'user.x', b'', 0, 0",
    "fsetxattr": "1, b'user.x', b'', 0, 0", "removexattr": "b'.', b'user.x'",
    "utime": "b'.', 0", "utimes": "b'.', 0", "utimensat": "-100, b'.', 0, 0",
    "futimesat": "-100, b'.', 0", "name_to_handle_at": "-100, b'.', buffer, buffer, 0",
    "open_by_handle_at": "-100, buffer, 0", "openat2": "-100, b'.', buffer, 24",
    "mount": "b'tmpfs', b'.', b'tmpfs', 0, 0", "umount2": "b'.', 2", "pivot_root": "b'.', b'.'",
    "chroot": "b'.'", "open_tree": "-100, b'.', 1", "move_mount": "-100, b'.', -100, b'.', 0",
    "fsopen": "b'tmpfs', 0", "fspick": "-100, b'.', 0", "fsmount": "0, 0, 0",
    "fsconfig": "0, 0, 0, 0, 0", "mount_setattr": "-100, b'.', 0, buffer, 32",
    "inotify_init1": "0", "inotify_init": "", "fanotify_init": "0, 0", "sync": "", "syncfs": "1",
    "splice": "0, 0, 1, 0, 1, 0", "tee": "0, 1, 1, 0", "vmsplice": "1, buffer, 1, 0",
    "swapon": "b'x', 0", "swapoff": "b'x'", "acct": "0", "quotactl": "0, 0, 0, 0",
    # The kernel's large interfaces.
    "io_uring_setup": "8, buffer", "io_uring_enter": "0, 0, 0, 0, 0, 0",
    "io_uring_register": "0, 0, 0, 0", "io_setup": "8, buffer", "io_submit": "0, 0, 0",
    "userfaultfd": "1", "perf_event_open": "buffer, 0, -1, -1, 0", "bpf": "0, buffer, 128",
    "keyctl": "0, -3, 1, 0, 0", "add_key": "b'user', b'x', b'x', 1, -3",
    "request_key": "b'user', b'x', 0, -3", "personality": "0x40000", "modify_ldt": "0, buffer, 64",
    "iopl": "0", "ioperm": "0, 1, 0", "set_mempolicy": "0, 0, 0", "mlockall": "1",
    "init_module": "buffer, 1, b''", "finit_module": "0, b'', 0", "kexec_load": "0, 0, 0, 0",
    "reboot": "0, 0, 0, 0", "syslog": "10, 0, 0", "clock_settime": "0, buffer",
    "settimeofday": "0, 0", "adjtimex": "buffer", "sethostname": "b'x', 1", "vhangup": "",
    "futex_waitv": "buffer, 1, 0, 0, 0", "signalfd4": "-1, buffer, 8, 0",
    # Sockets and the rest of what connects processes.
    "socket": "1, 1, 0", "connect": "0, buffer, 16", "bind": "0, buffer, 16", "listen": "0, 1",
    "accept4": "0, 0, 0, 0", "sendmsg": "1, buffer, 0", "sendmmsg": "1, buffer, 1, 0",
    "recvmmsg": "0, buffer, 1, 0, 0", "setsockopt": "0, 1, 7, buffer, 4",
    "shmget": "0, 4096, 0o1600", "shmat": "0, 0, 0", "semget": "0, 1, 0o1600",
    "semop": "0, buffer, 1", "msgget": "0, 0o1600", "msgsnd": "0, buffer, 1, 0",
    "mq_open": "b'x', 0o102, 0o600, 0", "mq_unlink": "b'x'",
}  # fmt: skip


def _refused(name: str, arguments: str) -> str:
    error = "EPERM" if name in REFUSED_WITH_EPERM else "ENOSYS"
    listed = f"{arguments}, " if arguments else ""
    # A library or a kernel that does not know the call is as good as a refusal.
    return f"if '{name}' in facts['numbers']: attempt('{name}', {listed}expected=errno.{error})"


REFUSED_PROGRAMS = {name: _refused(name, arguments) for name, arguments in _REFUSED.items()}

_PIPE = "r, w = os.pipe()\n"
_PAIR = "a, b = socket.socketpair()\nr, w = a.fileno(), b.fileno()\n"
_OWNER = "struct.pack('ii', {}, parent)"
# Name -> command and argument of fcntl, on the reading end of a pipe.
_FCNTL = {
    "owner": "8, parent", "owner_group": "8, -os.getpgid(parent)",
    "owner_thread": f"15, {_OWNER.format(0)}", "owner_process": f"15, {_OWNER.format(1)}",
    "owner_process_group": f"15, {_OWNER.format(2)}", "signal": "10, 9", "signal_stop": "10, 19",
    "async": "4, 0x2000", "async_nonblocking": "4, 0x2800", "async_high": "4, HIGH | 0x2000",
    "lease": "1024, 0", "notify": "1026, 0x8000003f", "pipe_size": "1031, 1 << 20",
    "seal": "1033, 15", "write_hint": "1036, buffer", "unknown": "999, 0",
    "owner_high": "HIGH | 8, parent", "owner_sign": "-(1 << 63) | 8, parent",
    "owner_all_high": "-(1 << 32) | 8, parent", "owner_ex_high": f"HIGH | 15, {_OWNER.format(1)}",
    "signal_high": "HIGH | 10, 9", "async_by_high_command": "HIGH | 4, 0x2000",
    "allowed_with_high": "HIGH | 1, 0",
}  # fmt: skip
_IOCTL = {
    "FIOASYNC": 0x5452, "FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902, "TIOCSTI": 0x5412,
    "TIOCSCTTY": 0x540E, "TIOCSPGRP": 0x5410, "TIOCLINUX": 0x541C, "TIOCCONS": 0x541D,
    "TIOCSETD": 0x5423, "TIOCNOTTY": 0x5422, "FS_IOC_SETFLAGS": 0x40086602, "FICLONE": 0x40049409,
    "FIFREEZE": 0xC0045877, "RNDADDENTROPY": 0x40085203, "FIOASYNC_high": 1 << 32 | 0x5452,
    "FIONBIO_high": 1 << 32 | 0x5421, "TIOCSTI_high": -(1 << 32) | 0x5412,
}  # fmt: skip
_PRCTL = {
    "PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4, "PR_SET_KEEPCAPS": 8, "PR_SET_SECCOMP": 22,
    "PR_SET_TSC": 26, "PR_SET_SECUREBITS": 28, "PR_SET_MCE_KILL": 33, "PR_SET_MM": 35,
    "PR_SET_CHILD_SUBREAPER": 36, "PR_CAP_AMBIENT": 47, "PR_SET_SPECULATION_CTRL": 53,
    "PR_SET_SYSCALL_USER_DISPATCH": 59, "PR_SCHED_CORE": 62, "PR_SET_PTRACER": 0x59616D61,
    "PR_SET_PDEATHSIG_high": 1 << 32 | 1, "PR_SET_NAME_high": 1 << 32 | 15,
}  # fmt: skip
_OTHER = {
    "prlimit_of_parent": "attempt('prlimit64', parent, 7, struct.pack('QQ', 0, 0), 0)",
    "prlimit_of_parent_high": "attempt('prlimit64', HIGH | parent, 7, 0, buffer)",
    "prlimit_of_self_high": "attempt('prlimit64', HIGH, 7, 0, buffer)",
    "prlimit_of_first": "attempt('prlimit64', 1, 7, 0, buffer)",
    "socketpair_inet": "attempt('socketpair', 2, 1, 0, buffer)",
    "socketpair_netlink": "attempt('socketpair', 16, 3, 0, buffer)",
    "socketpair_high": "attempt('socketpair', HIGH | 1, 1, 0, buffer)",
    "sendto_address": "attempt('sendto', 1, buffer, 1, 0, buffer, 110)",
    "clone_process": "attempt('clone', 17, 0, 0, 0, 0)",
    "clone_parent": "attempt('clone', 0x8000 | 17, 0, 0, 0, 0)",
    "clone_signal": "attempt('clone', 9, 0, 0, 0, 0)",
    "clone_high": "attempt('clone', 0x10000 << 32 | 17, 0, 0, 0, 0)",
    "clone_user": "attempt('clone', 0x10000000 | 17, 0, 0, 0, 0)",
    "clone_thread_in_namespace": "attempt('clone', 0x10000 | 0x20000, 0, 0, 0, 0)",
    "clone_vfork": "attempt('clone', 0x4100 | 17, 0, 0, 0, 0)",
    "futex_lock_of_parent": "struct.pack_into('I', buffer, 0, parent)\n"
    "for op in (6, 8, 13): attempt('futex', buffer, op | 128, 0, 0, 0, 0)",
    "futex_requeue_pi": "for op in (7, 11, 12): attempt('futex', buffer, op, 0, 0, 0, 0)",
    "futex_high": "attempt('futex', buffer, HIGH | 6, 0, 0, 0, 0)",
    "clocks_of_parent": "clock = ~parent << 3\n"
    "for name in ('clock_gettime', 'clock_getres'):\n"
    "    for kind in (0, 1, 2, 4, 5, 6): attempt(name, clock | kind, buffer)",
    "sleep_by_clock_of_parent": "attempt('clock_nanosleep', ~parent << 3 | 2, 0, buffer, 0)",
    "timer_by_clock_of_parent": "for kind in (0, 1, 2):\n"
    "    attempt('timer_create', ~parent << 3 | kind, 0, buffer)",
    "timer_by_clock_high": "attempt('timer_create', HIGH | (~parent << 3 | 2) % HIGH, 0, buffer)",
    "timer_by_clock_of_a_device": "attempt('timer_create', ~1 << 3 | 3, 0, buffer)",
    "futex_fd": "attempt('futex', buffer, 2, 9, 0, 0, 0)",
}

ARGUMENT_PROGRAMS = {
    **{f"fcntl_{k}": f"{_PIPE}attempt('fcntl', r, {v})" for k, v in _FCNTL.items()},
    **{f"fcntl_{k}_of_socket": f"{_PAIR}attempt('fcntl', r, {v})" for k, v in _FCNTL.items()},
    **{f"ioctl_{k}": f"{_PAIR}attempt('ioctl', r, {v}, buffer)" for k, v in _IOCTL.items()},
    **{f"prctl_{k}": f"attempt('prctl', {v}, 9, 0, 0, 0)" for k, v in _PRCTL.items()},
    **_OTHER,
}

# Programs that do all to send their parent a signal, whatever is refused on the way.
_SEND = """
for target in (parent, -os.getpgid(parent), -1):
    for sent in (9, 19):
        quietly(raw, 'fcntl', r, {owner})
        quietly(raw, 'fcntl', r, 10 | {high}, sent)
        raw('fcntl', r, 4 | {high}, 0x2800)
        raw('ioctl', r, 0x5452, struct.pack('i', 1))
        os.write(w, b'x' * 10); os.close(os.dup(w)); time.sleep(0.01)
"""
_TARGETS = {
    "process": "8 | {high}, target",
    "extended": "15 | {high}, struct.pack('ii', 1 if target > 0 else 2, abs(target))",
    "thread": "15 | {high}, struct.pack('ii', 0, abs(target))",
}
SIGNAL_PROGRAMS = {
    f"signal_by_{kind}_to_{target}{'_high' * bool(high)}": source
    + _SEND.format(owner=owner.format(high=high), high=high)
    for kind, source in (("pipe", _PIPE), ("socket", _PAIR))
    for target, owner in _TARGETS.items()
    for high in (0, 1 << 32)
} | {
    "signal_by_urgent_data": _PAIR
    + "raw('ioctl', r, 0x8901, struct.pack('i', parent)); raw('fcntl', r, 8, parent)\n"
    "b.send(b'x', socket.MSG_OOB)",
    "signal_by_lease": "f = os.open(sys.executable, os.O_RDONLY)\n"
    "raw('fcntl', f, 8, parent); raw('fcntl', f, 10, 9); raw('fcntl', f, 1024, 0)\n"
    "quietly(os.open, sys.executable, os.O_WRONLY)",
    "signal_by_notification": "d = os.open('.', os.O_RDONLY)\nraw('fcntl', d, 8, parent)\n"
    "raw('fcntl', d, 10, 9); raw('fcntl', d, 1026, 0x8000003f)\nquietly(os.mkdir, 'x')",
    "signal_by_timer": "event = struct.pack('QiiI', 0, 9, 4, parent) + bytes(44)\n"
    "if raw('timer_create', 0, event, buffer) >= 0: escaped()",
    "signal_by_message_queue": "raw('mq_notify', 0, struct.pack('Qii', 0, 9, 0) + bytes(48))",
    "signal_by_parents_death": "raw('prctl', 1, 9, 0, 0, 0); raw('prctl', HIGH | 1, 9, 0, 0, 0)",
    "signal_by_number_in_a_loop": "for pid in range(-1, 200):\n"
    "    for number in (9, 19, 0):\n        raw('kill', pid, number); raw('tkill', pid, number)\n"
    "        raw('tgkill', pid, pid, number); raw('rt_sigqueueinfo', pid, number, buffer)",
    "signal_by_limit": "for pid in range(1, 100): raw('prlimit64', pid, 0, buffer, 0)",
}

NAMES = [
    *_REFUSED, "fcntl", "ioctl", "prctl", "prlimit64", "socketpair", "sendto", "clone", "futex",
    "timer_create", "timer_settime", "clock_gettime", "clock_getres", "clock_nanosleep",
    "mq_notify", "exit", "fallocate",
]  # fmt: skip

# Calls by any number with any arguments, the same for a seed. What merely ends the program or makes
# it wait is left out (exit, pause, select, changes of its own memory and signals).
_RANDOM = """
import random
draw = random.Random({seed})
address = ctypes.addressof(buffer)
values = [0, 1, 2, 3, 4, 5, 9, 17, 64, 4096, 0x2000, 0x10000, -1, -100, parent, -parent, HIGH,
          HIGH | 8, HIGH | parent, 1 << 63, address, address + 8, os.getpid(), ~parent << 3 | 2]
skipped = (3, 7, 9, 10, 11, 12, 13, 15, 23, 25, 28, 34, 35, 37, 38, 60, 61, 128, 130, 131, 158, 218,
           222, 223, 230, 231, 232, 247, 270, 271, 273, 281, 334, 335, 336, 436, 441)
limit = time.monotonic() + 0.2
while time.monotonic() < limit:
    number = draw.choice((72, 16, 157, 302, 202, 56, 222, 53, 44, draw.randrange(470)))
    if number in skipped: continue
    for place in range(0, 256, 8):
        struct.pack_into("Q", buffer, place, draw.choice(values) % (1 << 64))
    libc.syscall(*[ctypes.c_long(v) for v in (number, *draw.choices(values, k=6))])
os.write(1, b"done")
"""
RANDOM_PROGRAMS = {f"seed_{seed}": _RANDOM.format(seed=seed) for seed in range(16)}
