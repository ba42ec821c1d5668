"""Programs that attack through what they were given or leave behind.

Each body runs after `system_calls.PRELUDE`. It prints ESCAPED where one program can tell by itself
that it got out; most aim at the next program instead, or at the sandbox's server.
"""

DESCRIPTOR_PROGRAMS = {
    "more_than_the_standard_ones": """
for descriptor in range(3, 1 << 16):
    if quietly(os.fstat, descriptor): escaped(descriptor)""",
    "more_in_an_executed_program": """
os.execv('/bin/sh', ['sh', '-c', 'for i in 3 4 5 6 7 8 9; do '
    'if (: >&$i) 2>&-; then echo ESCAPED $i; fi; done; for i in 3 4 5 6 7 8 9; do '
    'eval "exec 2>&- $i>&$i" && echo ESCAPED; done'])""",
    "input_is_written": "if quietly(os.write, 0, b'x'): escaped()",
    "input_is_written_at_a_place": "if quietly(os.pwrite, 0, b'x', 0): escaped()",
    "input_is_cut": "quietly(os.ftruncate, 0, 0) is None or escaped()",
    "input_grows": "if raw('fallocate', 0, 0, 0, 1 << 20) == 0: escaped()",
    "input_is_mapped": "if quietly(mmap.mmap, 0, 4, mmap.MAP_SHARED): escaped()",
    "input_is_opened_again": """
for name in ('/proc/self/fd/0', '/dev/fd/0', '/dev/stdin', f'/proc/{os.getpid()}/fd/0'):
    f = quietly(os.open, name, os.O_RDWR)
    if f and quietly(os.write, f, b'x'): escaped(name)
    if quietly(os.truncate, name, 0) or os.fstat(0).st_size == 0: escaped(name)""",
    "names_of_streams_are_changed": """
name = os.path.realpath('/dev/stdin')
folder = os.path.dirname(name) if name.startswith('/sandbox/') else None
for path in filter(None, ('/dev/stdin', name, folder, folder and f'{folder}/stdout')):
    for change in (os.unlink, os.rmdir, lambda p: os.rename(p, p + 'x'),
                   lambda p: raw('chmod', p.encode(), 0o777) and os.stat('/nowhere')):
        if quietly(lambda: (change(path), 1)[1]): escaped(path)
if folder and quietly(open, f'{folder}/new', 'w'): escaped('new')
quietly(lambda: os.truncate('/dev/stdout', 1 << 20)); quietly(fcntl.fcntl, 1, fcntl.F_SETFL, 0x400)
quietly(fcntl.lockf, os.open('/dev/stdout', os.O_RDWR), fcntl.LOCK_EX)""",
    "terminal": "if quietly(os.open, '/dev/tty', os.O_RDWR): escaped()",
    "new_terminal": "if quietly(os.open, '/dev/ptmx', os.O_RDWR): escaped()",
    "descriptors_of_the_server": """
for pid in (parent, 1, os.getppid()):
    for n in range(64):
        if quietly(os.open, f'/proc/{pid}/fd/{n}', os.O_RDWR): escaped(n)""",
    "memory_of_the_server": """
for pid in (parent, 1):
    for name in ('mem', 'maps', 'environ', 'auxv', 'root', 'cwd', 'ns/user', 'oom_score_adj'):
        if quietly(os.open, f'/proc/{pid}/{name}', os.O_RDONLY): escaped(name)""",
    "folders_of_the_server": """
for pid in (parent, 1):
    for name in ('root', 'cwd'):
        if quietly(os.listdir, f'/proc/{pid}/{name}/'): escaped(name)""",
    "own_setting_by_proc": """
for name in ('oom_score_adj', 'coredump_filter', 'clear_refs', 'uid_map', 'timerslack_ns'):
    if quietly(os.open, f'/proc/self/{name}', os.O_WRONLY): escaped(name)""",
    "kernel_setting": """
for name in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/power/state',
             '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/pids/tasks', '/dev/kmsg', '/dev/mem'):
    if quietly(os.open, name, os.O_WRONLY): escaped(name)""",
    "standard_ones_without_waiting": """
for descriptor in range(3): os.set_blocking(descriptor, False)
print('x' * (1 << 20))""",
    "standard_ones_closed": "os.closerange(0, 1 << 16)\ntime.sleep(0.05)",
    "all_descriptors_written": """
reply = json.dumps({"endings": [{"exit_code": 0, "cpu_s": 0, "peak_bytes": 0}], "wall_s": 0,
                    "is_late": False}).encode()
for descriptor in range(3, 1024):
    if quietly(os.write, descriptor, reply): escaped(descriptor)""",
    "descriptor_sent_to_itself": """
a, b = socket.socketpair()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack('i', 0))]
if quietly(a.sendmsg, [b'x'], rights): escaped()""",
    "output_sealed": "raw('fcntl', 1, 1033, 15) == -errno.ENOSYS or escaped()",
    "output_with_holes": "os.ftruncate(1, 1 << 20)\nos.lseek(1, 0, os.SEEK_END)\nprint('x')",
    "output_mapped": """
os.ftruncate(1, 1 << 16)
area = mmap.mmap(1, 1 << 16, mmap.MAP_SHARED)
area[:4] = b'XXXX'""",
}

HOST_FILE_PROGRAMS = {
    name: f"path = facts['file']\n{body}"
    for name, body in {
        "read": "if quietly(open, path): escaped()",
        "write": "if quietly(open, path, 'a'): escaped()",
        "cut_by_name": "quietly(os.truncate, path, 0)",
        "cut_by_opening": "quietly(os.open, path, os.O_RDONLY | os.O_TRUNC)",
        "cut_by_opening_as_a_path": "quietly(os.open, path, os.O_PATH | os.O_TRUNC)",
        "mode": "quietly(os.chmod, path, 0)",
        "owner": "quietly(os.chown, path, -1, -1)",
        "attribute": "quietly(os.setxattr, path, 'user.x', b'x')",
        "times": "quietly(os.utime, path, (1, 1))",
        "times_of_a_descriptor": """
f = quietly(os.open, path, os.O_PATH)
if f is not None: quietly(os.utime, f'/proc/self/fd/{f}', (1, 1)); quietly(os.utime, f, (1, 1))""",
        "times_by_numbers": """
name, times = path.encode(), struct.pack('QQQQ', 1, 1, 1, 1)
raw('utimensat', -100, name, times, 0); raw('utime', name, times); raw('utimes', name, times)
raw('futimesat', -100, name, times)""",
        "removed": "quietly(os.unlink, path)",
        "renamed": "quietly(os.rename, path, path + 'x')",
        "linked": "quietly(os.link, path, path + 'x')",
        "swapped": "quietly(os.replace, '/dev/null', path)",
        "through_a_link": "quietly(os.symlink, path, 'x'); quietly(open, 'x', 'w')",
        "hole": "f = quietly(os.open, path, os.O_RDONLY)\n"
        "if f is not None: raw('fallocate', f, 3, 0, 9); escaped()",
        "repository": "if quietly(os.listdir, facts['repository']): escaped()",
        "neighbour": "if quietly(open, path + '_new', 'w'): escaped()",
        "home": "if quietly(open, '/root/x', 'w') or quietly(os.listdir, '/home'): escaped()",
    }.items()
}  # fmt: skip

_TIMER = """
def timer(number, seconds=0.02, clock=1):
    event, made = struct.pack('Qii', 0, number, 0) + bytes(48), ctypes.c_int()
    libc.syscall(ctypes.c_long(facts['numbers']['timer_create']), ctypes.c_long(clock), event,
                 ctypes.byref(made))
    spec = struct.pack('qqqq', 0, 0, 0, int(seconds * 1e9))
    libc.syscall(ctypes.c_long(facts['numbers']['timer_settime']), made, ctypes.c_long(0), spec,
                 ctypes.c_long(0))
"""

STATE_PROGRAMS = {
    "names_that_are_no_text": """
for name in (b'\\n', b'\\xff' * 255, b'-rf', b'\\x1b[2J', b'*', b' ', b'..x', b'\\xc3\\x28'):
    quietly(os.mkdir, name); quietly(os.chdir, name)
    quietly(lambda: open(name + b'f', 'w').close())""",
    "modes_of_nothing": """
os.umask(0o777)
for n in range(50): quietly(os.mkdir, f'{n}', 0); quietly(lambda: open(f'{n}f', 'w').close())""",
    "all_inodes": "for n in range(2000): quietly(lambda: open(f'{n}', 'w').close())",
    "all_bytes": """
f = quietly(open, 'x', 'wb')
for n in range(100): quietly(lambda: (f.write(bytes(1 << 20)), f.flush()))""",
    "deep_folder_as_cwd": "for _ in range(900): quietly(os.mkdir, 'd'); quietly(os.chdir, 'd')",
    "removed_cwd": "quietly(os.mkdir, 'd'); quietly(os.chdir, 'd'); quietly(os.rmdir, '../d')",
    "held_and_mapped_files": """
f = quietly(open, 'x', 'w+b')
if f: f.truncate(1 << 20); m = mmap.mmap(f.fileno(), 0); m[5] = 1; quietly(os.unlink, 'x')
time.sleep(0.05); os._exit(0)""",
    "links_in_a_circle": "quietly(os.symlink, 'b', 'a'); quietly(os.symlink, 'a', 'b')",
    "folder_is_renamed": "for p in ('/sandbox/tmp', '.'): quietly(os.rename, p, '/sandbox/x')",
    "folder_is_removed": "for p in ('/sandbox/tmp', '/sandbox/build', '.'): quietly(os.rmdir, p)",
    "threads_that_linger": """
threading.stack_size(1 << 16)
for _ in range(400):
    if quietly(lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()): break
os._exit(0)""",
    "threads_beyond_the_limit": """
threading.stack_size(1 << 15)
try:
    for _ in range(5000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
except RuntimeError: pass
os._exit(0)""",
    "threads_die_together": """
threading.stack_size(1 << 16)
try:
    for _ in range(50): threading.Thread(target=lambda: [time.sleep(0.02), os._exit(0)]).start()
except RuntimeError: pass""",
    "main_thread_ends_first": """
threading.Thread(target=time.sleep, args=(9,)).start()
raw('exit', 0)""",
    "main_thread_ends_and_another_exits": """
threading.Thread(target=lambda: [time.sleep(0.05), os._exit(0)]).start()
raw('exit', 0)""",
    "another_thread_executes": """
threading.Thread(target=os.execv, args=('/bin/true', ['true'])).start()
time.sleep(9)""",
    "memory_until_refused": """
held = []
while True:
    try: held.append(bytearray(1 << 24))
    except MemoryError: os._exit(0)""",
    "mappings_until_refused": """
held = []
while True:
    try: held.append(mmap.mmap(-1, 4096, prot=1 + len(held) % 2))
    except (OSError, MemoryError): os._exit(0)""",
    "pipes_full": """
pipes = []
while (pair := quietly(os.pipe)): pipes.append(pair)
for _, w in pipes: os.set_blocking(w, False); quietly(os.write, w, bytes(1 << 20))""",
    "sockets_full": """
pairs = []
while (pair := quietly(socket.socketpair)): pairs.append(pair)
for one, two in pairs:
    one.setblocking(False)
    while quietly(one.send, bytes(1 << 16)): pass""",
    "timers_without_end": """
while (result := raw('timer_create', 1, 0, buffer)) == 0: pass
assert result == -errno.EAGAIN
print(len(os.listdir('/dev')))""",
    "locks_without_end": """
f = quietly(open, 'x', 'w') or open(sys.executable)
end = time.monotonic() + 0.2
kind = fcntl.F_WRLCK if f.writable() else fcntl.F_RDLCK
for n in range(1 << 20):
    fcntl.fcntl(f, fcntl.F_SETLK, struct.pack('hhqqi', kind, 0, 2 * n, 1, 0))
    if time.monotonic() > end: break""",
    "locks_on_all_that_can_be_read": """
for folder, _, files in os.walk(os.path.dirname(os.__file__)):
    held = [open(os.path.join(folder, name)) for name in files[:20]]
    for f in held: quietly(fcntl.lockf, f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if len(folder) > 60: break
os._exit(0)""",
    "standard_files_locked": """
for f in range(3): quietly(fcntl.lockf, f, fcntl.LOCK_EX | fcntl.LOCK_NB)
os._exit(0)""",
    "limits_of_nothing": """
for name in dir(resource):
    if name.startswith('RLIMIT_'): quietly(resource.setrlimit, getattr(resource, name), (0, 0))
""",
    "limits_without_end": """
for name in dir(resource):
    if name.startswith('RLIMIT_'):
        number = getattr(resource, name)
        soft, hard = resource.getrlimit(number)
        wanted = (-1, -1) if hard != -1 else (1, 1 << 62)
        if hard != -1 and quietly(lambda: resource.setrlimit(number, wanted) or 1): escaped(name)
os._exit(0)""",
    "own_name": "for n in (b') Z 1 (', b'\\n\\n', b'\\xff'): raw('prctl', 15, n, 0, 0, 0)",
    "errors_without_end": "quietly(lambda: [os.write(2, bytes(1 << 20)) for _ in range(64)])",
    "errors_that_are_no_text": "os.write(2, bytes(range(256)) * 999)\nos._exit(1)",
    "epoll_of_itself": """
import select
e = [select.epoll() for _ in range(5)]
for a in e:
    for b in e: quietly(a.register, b.fileno())
for f in range(3): quietly(e[0].register, f)""",
    "all_signals_blocked": """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for n in range(1, 65): quietly(signal.signal, n, signal.SIG_IGN)
while True: pass""",
    "stopped_by_its_timer": _TIMER + "timer(signal.SIGSTOP)\ntime.sleep(9)",
    "stopped_by_terminal_signals": _TIMER
    + "for n in (20, 21, 22): timer(n)\ntime.sleep(0.1); timer(signal.SIGSTOP); time.sleep(9)",
    "stopped_and_continued": _TIMER
    + "timer(signal.SIGSTOP, 0.02); timer(signal.SIGCONT, 0.04); time.sleep(0.2)",
    "busy_while_stopped": _TIMER + """
threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
timer(signal.SIGSTOP)
while True: pass""",
}  # fmt: skip

ENDING_PROGRAMS = {
    **{
        f"timer_{number}": f"{_TIMER}timer({number})\ntime.sleep(0.1)"
        for number in (1, 2, 3, 4, 6, 7, 8, 9, 11, 13, 14, 15, 17, 23, 24, 25, 26, 29, 31, 34, 64)
    },
    **{f"code_{code}": f"os._exit({code})" for code in (1, 90, 94, 95, 96, 97, 126, 127, 255)},
    "alarm_in_the_next_program": "signal.setitimer(signal.ITIMER_REAL, 0.03)\n"
    "os.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])",
    "pointer": "ctypes.string_at(0)",
    "bus": "f = quietly(open, 'x', 'w+b')\nif f: f.truncate(9); m = mmap.mmap(f.fileno(), 9); "
    "f.truncate(0); m[0]",
    "executed_python": "os.execv(sys.executable, [sys.executable, '-c', 'import os; os.fork()'])",
    "executed_nothing": "os.execv('/dev/null', ['x'])",
    "executed_folder": "os.execv('/usr/bin', ['x'])",
    "executed_script_without_interpreter": "f = quietly(os.open, 'x', 0o101, 0o755)\n"
    "if f: os.write(f, b'#!/nowhere'); os.close(f); os.execv('./x', ['x'])",
    "executed_script_of_itself": "f = quietly(os.open, 'x', 0o101, 0o755)\n"
    "if f: os.write(f, b'#!./x'); os.close(f); os.execv('./x', ['x'])",
    "executed_with_arguments_without_end": "os.execv('/bin/true', ['x' * 100000] * 400)",
    "executed_set_user": "for p in ('/usr/bin/su', '/usr/bin/passwd', '/usr/bin/chsh'):\n"
    "    if os.path.exists(p): os.execv(p, [p, '--version'])",
    "unmapped_itself": "libc.munmap(ctypes.c_void_p(id(None) & ~4095), 1 << 12)",
    "lone_surrogate": "print('\ud800')",
}

_NEIGHBOUR = "import ctypes, fcntl, mmap, os, signal, socket, struct, sys, threading, time\n"
_NEIGHBOUR += "libc = ctypes.CDLL(None, use_errno=True)\n"
_NEIGHBOUR += "def quietly(function, *arguments):\n"
_NEIGHBOUR += "    try: return function(*arguments)\n    except OSError: return None\n"
# Solutions that attack the process of their unit tests by what both share, or by their own state.
NEIGHBOUR_SOLUTIONS = {
    name: f"{_NEIGHBOUR}{body}"
    for name, body in {
        "signal_to_the_tests": """
def f(x):
    for pid in [*range(os.getpid() - 4, os.getpid() + 4), os.getppid(), -os.getppid()]:
        r, w = os.pipe()
        for command, value in ((8, pid), (10, 9), (4, 0x2800)):
            quietly(fcntl.fcntl, r, command, value)
        os.write(w, b'x'); quietly(os.kill, pid, 9)
        quietly(fcntl.fcntl, 4, 8, pid); quietly(fcntl.fcntl, 4, 10, 9)
        quietly(fcntl.fcntl, 4, 4, 0x2000)""",
        "stops_itself": "facts = {'numbers': {'timer_create': 222, 'timer_settime': 223}}\n"
        f"{_TIMER}def f(x):\n    timer(signal.SIGSTOP)\n    time.sleep(9)",
        "closes_all": "def f(x): os.closerange(0, 1 << 16)",
        "closes_all_when_defined": "def f(x): pass\nos.closerange(0, 1 << 16)",
        "fills_the_connection": """
def f(x):
    os.set_blocking(4, False)
    while quietly(os.write, 4, bytes(1 << 16)): pass""",
        "fills_the_connection_when_defined": """
def f(x): return x
os.set_blocking(4, False)
while quietly(os.write, 4, bytes(1 << 16)): pass""",
        "shuts_the_connection_down": "def f(x): libc.shutdown(4, 2)",
        "urgent_data": "def f(x): socket.socket(fileno=4).send(b'x', socket.MSG_OOB)",
        "echo": "def f(x):\n    os.dup2(4, 0); os.dup2(4, 1); os.execv('/bin/cat', ['cat'])",
        "echo_when_defined": "os.dup2(4, 0); os.dup2(4, 1); os.execv('/bin/cat', ['cat'])",
        "executes_true": "def f(x): os.execv('/bin/true', ['true'])",
        "locks_the_input": """
def f(x):
    for n in range(3): quietly(fcntl.lockf, n, fcntl.LOCK_EX)
    os.lseek(0, 1 << 30, os.SEEK_SET); quietly(os.ftruncate, 0, 1 << 20)""",
        "threads_that_linger": """
def f(x):
    threading.stack_size(1 << 16)
    for _ in range(70): threading.Thread(target=time.sleep, args=(9,)).start()""",
        "main_thread_ends_first": """
threading.Thread(target=time.sleep, args=(9,)).start()
def f(x): libc.syscall(60, 0)""",
        "answers_after_its_end": """
def f(x):
    threading.Thread(target=lambda: [time.sleep(0.05), quietly(os.write, 4, bytes(99))]).start()
    libc.syscall(60, 0)""",
        "blocks_all_signals": """
def f(x):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True: pass""",
    }.items()
}
