"""Python programs that attack the sandbox through files, processes, memory, signals, the kernel.

Each body runs after PRELUDE and prints ESCAPED if its attack succeeded. `facts` tells what an
attacker could at best know of the host.
"""

PRELUDE = """
import builtins, ctypes, gc, json, mmap, os, re, resource, signal, socket, sys, threading, time
facts = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
HELD = []
def escaped():
    print("ESCAPED", flush=True)
    raise SystemExit
def hold(size):
    HELD.append(bytearray(size))
"""

PROCESSES = {
    "fork": "os.fork() or os._exit(0)\nescaped()",
    "fork_bomb": "while True: os.fork()",
    "memory_across_forks": """
for _ in range(8):
    if os.fork() == 0:
        hold(200 << 20); time.sleep(30); os._exit(0)
escaped()""",
    "setsid_daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
escaped()""",
    "grandchild_holds_output": "import subprocess\nsubprocess.Popen(['sleep', '60'])\nescaped()",
    "shell_that_forks": "os.execv('/bin/sh', ['sh', '-c', '(echo ESCAPED) | cat'])",
    "vfork_by_posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})\nescaped()",
    "threads_without_end": """
threading.stack_size(32768)
for _ in range(2000): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
escaped()""",
    "signal_to_parent": "os.kill(parent, signal.SIGKILL)\nescaped()",
    "signal_to_all": "os.kill(-1, signal.SIGKILL)\nescaped()",
    "signal_to_grader": "os.kill(facts['pid'], signal.SIGKILL)\nescaped()",
    "signal_to_group": "os.killpg(0, signal.SIGSTOP)\nescaped()",
    "signal_by_queue": "libc.sigqueue(parent, 9, None) or escaped()",
    "pidfd_of_parent": "os.pidfd_open(parent)\nescaped()",
    "ptrace_parent": "libc.ptrace(16, parent, None, None) or escaped()",
    "ptrace_traceme": "libc.ptrace(0, 0, None, None) or escaped()",
    "read_memory_of_parent": """
buffer = ctypes.create_string_buffer(8)
one = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
if libc.process_vm_readv(parent, one, 1, one, 1, 0) >= 0: escaped()""",
    "limits_of_parent": "resource.prlimit(parent, resource.RLIMIT_CPU, (1, 1))\nescaped()",
    "priority_of_parent": "os.setpriority(os.PRIO_PROCESS, parent, 19)\nescaped()",
    "survive_parent": "libc.prctl(1, 0, 0, 0, 0) or escaped()",
    "ignore_the_time_limit": """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass""",
    "cpu_spin": "while True: pass",
    "cpu_spin_in_threads": """
def spin():
    while True: sum(range(10000))
for _ in range(4): threading.Thread(target=spin).start()""",
    "sleep": "time.sleep(100)",
    "sleep_in_atexit": "import atexit\natexit.register(time.sleep, 100)",
    "wait_for_a_thread": "threading.Thread(target=time.sleep, args=(100,)).start()",
}

MEMORY = {
    "memory_by_threads": """
def grab():
    hold(60 << 20)
threads = [threading.Thread(target=grab) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
if len(HELD) == 8: escaped()""",
    "memory_all_at_once": "hold(1 << 40)\nescaped()",
    "mmap": "area = mmap.mmap(-1, 400 << 20)\nescaped()",
    "mmap_in_pieces": "HELD += [mmap.mmap(-1, 1 << 20) for _ in range(400)]\nescaped()",
    "memfd": """
for index in range(50):
    HELD.append(os.memfd_create(str(index)))
    os.write(HELD[-1], bytes(8 << 20))
escaped()""",
    "shared_memory_of_system_v": "if libc.shmget(0, 400 << 20, 0o1600) >= 0: escaped()",
    "message_queue": "if libc.msgget(0, 0o1600) >= 0: escaped()",
    "dev_shm": """
for index in range(64): open(f'/dev/shm/{index}', 'wb').write(bytes(1 << 20))
escaped()""",
    "raise_the_limits": """
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
escaped()""",
    "limits_of_self_by_prlimit": """
resource.prlimit(0, resource.RLIMIT_AS, (1 << 40, 1 << 40))
escaped()""",
    "huge_integer": "print(9 ** 9 ** 9)",
    "huge_integer_as_text": "sys.set_int_max_str_digits(0)\nstr(1 << (1 << 26))\nescaped()",
    "recursion_without_end": """
sys.setrecursionlimit(10 ** 9)
def down(): return down() + 1
down()""",
    "stack_overflow": """
sys.setrecursionlimit(10 ** 9)
nest = []
for _ in range(10 ** 6): nest = [nest]
repr(nest)""",
    "regex_bomb": "re.match('(a+)+$', 'a' * 60 + 'b')",
}

FILES = {
    "disk_one_large_file": "open('x', 'wb').write(bytes(64 << 20))\nescaped()",
    "disk_many_large_files": """
for index in range(64): open(f'{index}', 'wb').write(bytes(1 << 20))
escaped()""",
    "disk_many_empty_files": """
for index in range(20000): open(f'{index}', 'w').close()
escaped()""",
    "disk_sparse_file": "open('x', 'wb').truncate(10 << 30)\nescaped()",
    "disk_nested_folders": """
for _ in range(20000): os.mkdir('d'); os.chdir('d')
escaped()""",
    "output_flood": "while True: sys.stdout.write('ESCAPED ' * 8192)",
    "error_flood": "while True: sys.stderr.write('x' * 65536)",
    "output_written_over_input": "os.write(0, b'x')\nescaped()",
    "etc_passwd": "open('/etc/passwd').read(1) and escaped()",
    "etc_shadow": "open('/etc/shadow').read(1) and escaped()",
    "home_of_root": "open('/root/.bashrc').read(1) and escaped()",
    "file_of_the_host": "open(facts['file']).read(1) and escaped()",
    "repository": "open(facts['repository'] + '/README.md').read(1) and escaped()",
    "installed_packages": "os.listdir(facts['packages']) and escaped()",
    "symbolic_link": "os.symlink(facts['file'], 'link')\nopen('link').read(1) and escaped()",
    "hard_link": "os.link('/usr/bin/env', 'link')\nescaped()",
    "environment_of_first_process": "open('/proc/1/environ').read(1) and escaped()",
    "environment_of_parent": "open(f'/proc/{parent}/environ').read(1) and escaped()",
    "environment_of_grader": "open(f'/proc/{facts[\"pid\"]}/environ').read(1) and escaped()",
    "memory_file_of_parent": "open(f'/proc/{parent}/mem', 'rb')\nescaped()",
    "own_environment": "if facts['secret'] in os.environ: escaped()",
    "write_to_interpreter": "open(sys.executable, 'ab')\nescaped()",
    "write_to_library": "open(os.path.dirname(os.__file__) + '/x.py', 'w')\nescaped()",
    "write_to_root": "open('/x', 'w')\nescaped()",
    "write_to_build_folder": "open('../build/x', 'w')\nescaped()",
    "change_modes": "os.chmod('/usr/bin/env', 0o777)\nescaped()",
    "device_node": "os.mknod('disk', 0o60600, os.makedev(254, 0))\nescaped()",
    "close_output": "os.close(1)\nprint('ESCAPED', flush=True)",
    "read_input_twice": "escaped() if sys.stdin.read() else None",
}

KERNEL = {
    "tcp_to_host": "socket.create_connection(('127.0.0.1', facts['port']), 1)\nescaped()",
    "udp": """
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', facts['port']))
escaped()""",
    "dns": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nescaped()",
    "abstract_socket_of_host": """
socket.socket(socket.AF_UNIX).connect(chr(0) + facts['abstract'])
escaped()""",
    "datagram_from_a_pair": """
one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.sendto(b'x', chr(0) + facts['abstract'] + '_datagram')
escaped()""",
    "listen": "socket.socket().listen()\nescaped()",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nescaped()",
    "become_root": "os.setuid(0)\nescaped()",
    "capabilities": """
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)
libc.capset(header, data) or escaped()""",
    "unshare_user": "libc.unshare(0x10000000) or escaped()",
    "unshare_mount": "libc.unshare(0x20000) or escaped()",
    "mount": "libc.mount(b'tmpfs', b'/usr', b'tmpfs', 0, None) or escaped()",
    "remount": "libc.mount(None, b'/', None, 32 | 4096, None) or escaped()",
    "unmount": "libc.umount2(b'/sandbox/tmp', 2) or escaped()",
    "chroot": "os.chroot('.')\nescaped()",
    "namespace_of_parent": "libc.setns(os.open(f'/proc/{parent}/ns/mnt', 0), 0) or escaped()",
    "keyctl": "if libc.syscall(250, 0, -3, 1) >= 0: escaped()",
    "add_key": "if libc.syscall(248, b'user', b'x', b'x', 1, -3) >= 0: escaped()",
    "bpf": "if libc.syscall(321, 0, bytes(128), 128) >= 0: escaped()",
    "io_uring": "if libc.syscall(425, 8, bytes(256)) >= 0: escaped()",
    "userfaultfd": "if libc.syscall(323, 1) >= 0: escaped()",
    "perf_event": "if libc.syscall(298, bytes(128), 0, -1, -1, 0) >= 0: escaped()",
    "personality": "if libc.personality(0x40000) >= 0: escaped()",
    "seccomp_off": "libc.prctl(22, 0, 0, 0, 0) or escaped()",
    "kernel_log": "if libc.klogctl(3, bytes(100), 100) >= 0: escaped()",
    "host_name": "socket.sethostname('x')\nescaped()",
}

HARNESS = {
    "write_to_all_descriptors": """
reply = json.dumps({"endings": [{"exit_code": 0, "cpu_s": 0, "peak_bytes": 0}], "wall_s": 0,
                    "is_late": False}).encode()
for descriptor in range(3, 1024):
    try: os.write(descriptor, reply)
    except OSError: continue
    escaped()""",
    "receive_on_all_descriptors": """
for descriptor in range(3, 1024):
    try: os.fstat(descriptor)
    except OSError: continue
    escaped()""",
    "exit_early": "sys.exit(0)",
    "exit_at_once": "os._exit(0)",
    "override_exit": """
os._exit = sys.exit = lambda code=0: None
builtins.print = builtins.exec = builtins.compile = lambda *a, **k: 0
os.write = os.close = os.fork = lambda *a, **k: 0
json.loads = json.dumps = lambda *a, **k: {'exit_code': 0}
raise SystemExit(0)""",
    "override_excepthook": "sys.excepthook = lambda *a: os._exit(0)\nraise ValueError",
    "call_the_server": """
server = sys.modules['verification.sandbox.server']
frame = sys._getframe()
while frame:
    for value in frame.f_locals.values():
        if isinstance(value, server.Server):
            value._reply({"endings": [{"exit_code": 0}]})
            escaped()
    frame = frame.f_back""",
    "kill_itself": "os.kill(os.getpid(), 9)",
    "invalid_memory": "ctypes.string_at(0)",
}
