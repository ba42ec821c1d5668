"""Limits of time: a crowded host fails no right program and saves no wrong one."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.verification.crowd import crowded
from verification.code.grading import Case, CodeLimits, CodeTests, grade, prepare
from verification.code.setup import limits_of_test
from verification.run_time import Watch, descendants, process_cpu_s
from verification.sandbox.sandbox import Sandbox, SandboxSpec, check_start
from verification.sandbox.time_limits import CPU, HOST, WALL, Limits, find_end, is_readable
from verification.verdict import GradingError, HostBusy

TESTS = CodeTests(cases=[Case("3 4\n", "7\n")])
ADD = "print(sum(map(int, input().split())))"
COMPUTE = "import time\nwhile time.process_time() < {}: pass\n" + ADD
KINDS = ("bubblewrap", "landlock")
MANY = 1_100
"""Descriptors: more than the 1,024 of select()."""


def _limits(kind: str = "auto", *, host_patience: float = 20.0) -> CodeLimits:
    return prepare(
        CodeLimits(test_s=1.0, wall_factor=1.5, host_patience=host_patience, isolation=kind)
    )


def _reason(source: str, limits: CodeLimits) -> str:
    return grade(source, "python", TESTS, seed=0, limits=limits).reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_program_within_its_cpu_time_is_right_beside_busy_processes(kind: str) -> None:
    limits = _limits(kind)
    with crowded(5):
        # 0.6 s of a sixth of a core: over twice what the clock on the wall allows.
        assert _reason(COMPUTE.format(0.6), limits) == "correct"


@pytest.mark.parametrize(
    "source", ["import time\ntime.sleep(60)", COMPUTE.format(1.2), COMPUTE.format(60)]
)
def test_one_that_sleeps_or_computes_too_long_times_out_there_as_well(source: str) -> None:
    limits = _limits()
    with crowded(3):
        assert _reason(source, limits) == "test_timeout"


def test_a_limit_of_cpu_time_need_not_be_whole_seconds() -> None:
    limits = prepare(CodeLimits(test_s=0.3, wall_factor=20.0))
    assert _reason(COMPUTE.format(0.5), limits) == "test_timeout"
    assert _reason(COMPUTE.format(0.1), limits) == "correct"


def test_a_compiler_has_its_cpu_time_beside_busy_processes() -> None:
    source = "#include <bits/stdc++.h>\nint main() { int a, b; std::cin >> a >> b; "
    source += "std::cout << a + b; }"
    # It takes about 1.3 s of CPU time, which an eighth of a core gives in 10 s.
    limits = prepare(CodeLimits(compile_s=3.0, wall_factor=1.0, host_patience=20.0))
    with crowded(7):
        assert grade(source, "cpp", TESTS, seed=0, limits=limits).reason == "correct"


def test_a_host_without_processes_or_silent_is_told_from_our_own_failure() -> None:
    with Sandbox(SandboxSpec(kind="landlock")) as sandbox:
        for number, kind in ((errno.EAGAIN, HostBusy), (errno.ENOMEM, HostBusy)):
            with pytest.raises(kind, match="could not be started"):
                check_start({"error": "no room", "errno": number})
        with pytest.raises(GradingError) as caught:
            sandbox.run(["/no/such/program"], b"", stdin=b"", limits=limits_of_test(CodeLimits()))
        assert not isinstance(caught.value, HostBusy)


def test_a_program_that_kills_itself_is_not_the_hosts_fault() -> None:
    assert _reason("import os\nos.kill(os.getpid(), 9)", _limits()) == "runtime_error"


def test_unit_tests_and_solution_in_turns_have_time_beside_busy_processes() -> None:
    # 0.3 s on either side.
    wait = "import time\ndef f(x):\n    end = time.process_time() + {}\n"
    wait += "    while time.process_time() < end: pass\n    return x\n"
    unit_tests = wait.format(0.003).replace("def f", "def own") + (
        "def check(candidate):\n    for i in range(100):\n        assert candidate(own(i)) == i\n"
    )
    tests = CodeTests(unit_tests=unit_tests, entry_point="f")
    limits = _limits()
    with crowded(4):
        found = grade(wait.format(0.003), "python", tests, seed=0, limits=limits)
    assert found.reason == "correct"


def test_a_host_too_crowded_for_any_verdict_is_told_from_a_wrong_program() -> None:
    limits = _limits(host_patience=1.0)
    with crowded(5), pytest.raises(HostBusy, match="a program got 0.* s of a core in"):
        _reason(COMPUTE.format(0.9), limits)


@pytest.mark.parametrize(
    ("elapsed_s", "cpu_s", "total_cpu_s", "waited_s", "end"),
    [
        (3.9, 3.9, 7.8, 0.0, ""),
        (4.0, 4.0, 4.0, 0.0, CPU),
        (7.9, 0.1, 0.1, 0.0, ""),
        (8.0, 0.1, 0.2, 0.0, WALL),
        (60.0, 2.5, 5.0, 57.0, ""),
        (60.0, 2.5, 2.5, 52.0, WALL),
        (80.0, 2.5, 2.5, 77.0, HOST),
        (80.0, 4.0, 4.0, 76.0, CPU),
        # Sixty-four that share two cores keep each other waiting.
        (5.0, 0.2, 8.0, 5.0, CPU),
        (80.0, 0.2, 8.0, 80.0, CPU),
    ],
)
def test_ends_by_hand(
    elapsed_s: float, cpu_s: float, total_cpu_s: float, waited_s: float, end: str
) -> None:
    limits = Limits(
        memory_bytes=0, cpu_s=4.0, wall_s=8.0, max_elapsed_s=80.0, file_bytes=0, processes=0,
        disk_bytes=0,
    )  # fmt: skip
    found = find_end(
        limits, elapsed_s=elapsed_s, cpu_s=cpu_s, total_cpu_s=total_cpu_s, waited_s=waited_s
    )
    assert found == end


def test_a_watch_adds_up_what_many_processes_use() -> None:
    # Eight that end with a tenth of a second each, and one that waits for them.
    source = "import os, time\nprint(flush=True)\nfor _ in range(8):\n"
    source += "    if os.fork() == 0:\n        while time.process_time() < 0.1: pass\n"
    source += "        time.sleep(0.5)\n        os._exit(0)\nfor _ in range(8): os.wait()"
    others = descendants(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        watch = Watch(os.getpid(), time.monotonic(), ignored=others)
        while child.poll() is None:
            time.sleep(0.02)
            watch.look(time.monotonic())
    finally:
        child.kill()
        child.wait()
    assert 0.8 <= watch.total_cpu_s < 1.5
    assert 0.1 <= watch.cpu_s < 0.5


def test_a_watch_tells_waiting_for_a_core_from_sleep() -> None:
    source = "import time\nprint(flush=True)\nwhile time.process_time() < 0.5: pass\ntime.sleep(60)"
    with crowded(3):
        child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            child.stdout.readline()
            started_s = time.monotonic()
            watch = Watch(os.getpid(), started_s, ignored={*descendants(os.getpid())} - {child.pid})
            before_s = process_cpu_s(child.pid)
            while process_cpu_s(child.pid) < 0.5:
                time.sleep(0.05)
                watch.look(time.monotonic())
            # What it did not get of the core it waited for.
            computed_s = process_cpu_s(child.pid) - before_s
            elapsed_s = time.monotonic() - started_s
            assert watch.waited_s == pytest.approx(elapsed_s - computed_s, abs=0.3 * elapsed_s)
            while psutil.Process(child.pid).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)
            watch.look(time.monotonic())
            waited_s = watch.waited_s
            for _ in range(10):
                time.sleep(0.05)
                watch.look(time.monotonic())
            assert watch.waited_s - waited_s < 0.25
            child.send_signal(signal.SIGKILL)
        finally:
            child.kill()
            child.wait()


def test_a_descriptor_of_any_number_is_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MANY:
        pytest.skip(f"this host allows {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    reader, writer = os.pipe()
    held = [os.dup(reader) for _ in range(MANY)]
    try:
        assert held[-1] > 1_024 and not is_readable(held[-1], 0.0)
        os.write(writer, b"x")
        assert is_readable(held[-1], 10.0)
    finally:
        for descriptor in (*held, reader, writer):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
