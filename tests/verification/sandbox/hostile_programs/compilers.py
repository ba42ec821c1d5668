"""What a compiler could do that its source has taken over: Python in the place of the compiler.

It may fork and write to the build folder, and both must end with it. Each body runs after PRELUDE.
"""

PRELUDE = """
import ctypes, os, resource, shutil, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
server = os.getppid()
def escaped(why=""):
    print("ESCAPED", why, flush=True)
def quietly(function, *arguments):
    try: return function(*arguments)
    except OSError: return None
def forked():
    return quietly(os.fork) == 0
def linger():
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(9)
"""

PROGRAMS = {
    "child_lives_on": "if forked(): linger()",
    "orphan_lives_on": "if forked():\n    if forked(): linger()\n    os._exit(0)\nos.wait()",
    "session_of_its_own": "if forked():\n    quietly(os.setsid) and escaped()\n    linger()",
    "group_of_its_own": "quietly(os.setpgid, 0, 0)\nif forked():\n    quietly(os.setpgid, 0, 0)\n"
    "    os.getpgrp() == os.getpid() and escaped()\n    linger()",
    "group_of_a_child": "pid = quietly(os.fork)\nif pid == 0: linger()\n"
    "quietly(os.setpgid, pid, pid)\nos.getpgid(pid) == pid and escaped()",
    "sibling_by_clone": "if libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0: escaped(); os._exit(0)",
    "signal_for_the_end": "if libc.syscall(56, 9, 0, 0, 0, 0) == 0: escaped(); os._exit(0)",
    "namespace_by_clone": "for flag in (0x10000000, 0x20000, 0x20000000):\n"
    "    if libc.syscall(56, flag | 17, 0, 0, 0, 0) == 0: escaped(); os._exit(0)",
    "namespace_by_clone3": "libc.syscall(435, bytes(88), 88) >= 0 and escaped()",
    "fork_bomb": "while True:\n    if forked(): linger()",
    "fork_bomb_that_spins": "while True: quietly(os.fork)",
    "forks_that_end": "while True:\n    if forked(): os._exit(0)",
    "chain_of_forks": "end = time.monotonic() + 0.3\nwhile time.monotonic() < end:\n"
    "    if (quietly(os.fork) or 0) > 0: os._exit(0)",
    "stopped_children": "for _ in range(9):\n"
    "    if forked(): quietly(signal.raise_signal, 19); linger()",
    "traced_child": "if forked():\n    libc.ptrace(0, 0, 0, 0) == 0 and escaped()\n    linger()",
    "signal_to_the_server": "for number in (9, 19): quietly(os.kill, server, number)\n"
    "quietly(os.kill, -1, 9)",
    "signal_by_descriptor": "import fcntl\nr, w = os.pipe()\n"
    "for command, value in ((8, server), (10, 9), (4, 0x2800)):\n"
    "    quietly(fcntl.fcntl, r, command, value) is None or escaped()\nos.write(w, b'x')",
    "signal_by_death": "if forked(): libc.prctl(1, 9, 0, 0, 0) == 0 and escaped(); os._exit(0)",
    "reaper": "libc.prctl(36, 1, 0, 0, 0) == 0 and escaped()",
    "limits_of_the_server": "quietly(resource.prlimit, server, 7, (9, 9)) and escaped()",
    "descriptors": "for n in range(3, 1 << 16):\n    if quietly(os.fstat, n): escaped(n)",
    "socket": "quietly(socket.socket) and escaped()",
    "source_is_removed": "quietly(os.unlink, 'solution.py')",
    "source_is_a_folder": "quietly(os.unlink, 'solution.py')\nquietly(os.mkdir, 'solution.py')",
    "source_is_a_link": "quietly(os.unlink, 'solution.py')\n"
    "quietly(os.symlink, '/sandbox', 'solution.py')",
    "folder_without_rights": "quietly(os.chmod, '.', 0)",
    "folder_full": "quietly(lambda: open('x', 'wb').write(bytes(400 << 20)))",
    "folder_full_of_names": "for n in range(999): quietly(lambda: open(str(n), 'w').close())",
    "folder_is_renamed": "quietly(os.rename, '.', '../x') or quietly(os.rename, os.getcwd(), '/x')",
    "file_of_the_host": "if len(sys.argv) > 1 and quietly(open, sys.argv[1], 'a'): escaped()",
    "mode_of_a_file_of_the_host": "quietly(os.chmod, sys.argv[1], 0o600)\n"
    "f = quietly(os.open, sys.argv[1], os.O_PATH)\n"
    "if f is not None: quietly(os.chmod, f'/proc/self/fd/{f}', 0o600)",
    "mode_of_the_system": "mode = os.stat('/usr/bin/env').st_mode\n"
    "quietly(os.chmod, '/usr/bin/env', 0o777)\n"
    "os.stat('/usr/bin/env').st_mode == mode or escaped()",
    "times_of_the_system": "quietly(os.utime, sys.executable) is None or escaped()",
    "program_is_a_folder": "quietly(os.mkdir, 'solution')",
    "program_is_a_link": "quietly(os.symlink, '/etc/passwd', 'solution')",
}  # fmt: skip
