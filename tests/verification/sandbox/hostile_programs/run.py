"""Grades a group of hostile programs: `python -m tests.verification.sandbox.hostile_programs.run`.

Arguments: the kind of isolation, the group, then names to take from it (all if none). A process of
its own, so that it can run as any user. Prints a Report as JSON.
"""

import contextlib
import glob
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from tests.verification.sandbox.hostile_programs import (
    cpp_programs,
    python_programs,
    solutions,
    states,
)
from verification.code.grading import Case, CodeLimits, CodeTests, grade, prepare
from verification.verdict import GradingError

SECRET_VARIABLE = "MEGATRON_RL_TEST_SECRET"
NONCE = "NONCE-0123456789abcdef0123456789abcdef"
LIMITS = CodeLimits(test_s=1.0, compile_s=5.0, wall_factor=1.5)
REPOSITORY = Path(__file__).resolve().parents[4]
UNIT_TESTS = f"SECRET = '{NONCE}'\ndef check(candidate):\n    assert candidate(1) == SECRET\n"
GROUPS = {
    "processes": python_programs.PROCESSES,
    "memory": python_programs.MEMORY,
    "files": python_programs.FILES,
    "kernel": python_programs.KERNEL,
    "harness": python_programs.HARNESS,
    "sources": solutions.SOURCES,
    "solutions": solutions.SOLUTIONS,
    "neighbours": states.NEIGHBOUR_SOLUTIONS,
    "cpp": cpp_programs.PROGRAMS,
    "compilations": cpp_programs.COMPILATIONS,
}


class Report(msgspec.Struct):
    """What came of a group."""

    reasons: dict[str, str] = {}
    """Reason of the verdict on each program."""
    seconds: dict[str, float] = {}
    ordinary: list[str] = []
    """Reasons of ordinary items graded after each program."""
    left: list[str] = []
    """What was left behind: processes, files, control groups, descriptors."""
    received_bytes: int = 0
    """What reached the sockets of the host."""
    isolation: str = ""


@contextlib.contextmanager
def host_facts() -> Iterator[tuple[dict[str, object], list[socket.socket]]]:
    """Things of the host that a program must not reach, and the sockets that listen for it."""
    name = f"megatron_rl_test_{os.getpid()}"
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", tcp.getsockname()[1]))
        stream = stack.enter_context(socket.socket(socket.AF_UNIX))
        stream.bind(f"\0{name}")
        stream.listen()
        datagram = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagram.bind(f"\0{name}_datagram")
        file = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        file.write("a secret of the host")
        file.flush()
        os.chmod(file.name, 0o644)
        facts = {
            "pid": os.getpid(), "port": tcp.getsockname()[1], "abstract": name, "file": file.name,
            "repository": str(REPOSITORY), "packages": os.path.dirname(psutil.__path__[0]),
            "secret": SECRET_VARIABLE,
        }  # fmt: skip
        yield facts, [tcp, udp, stream, datagram]


def verdict_on(group: str, source: str, facts: dict[str, object]) -> str:
    """Reason of the verdict on a program; "correct" if its attack succeeded."""
    if group in ("solutions", "neighbours"):
        tests = CodeTests(unit_tests=UNIT_TESTS, entry_point="f")
        return grade(source, "python", tests, seed=0, limits=LIMITS).reason
    tests = CodeTests(cases=[Case(json.dumps(facts), "ESCAPED\n")])
    tag = "cpp" if group in ("cpp", "compilations") else "python"
    has_prelude = tag == "python" and group != "sources"
    code = python_programs.PRELUDE + source if has_prelude else source
    return grade(code, tag, tests, seed=0, limits=LIMITS).reason


def ordinary_reason() -> str:
    """Verdict on a right solution."""
    tests = CodeTests(cases=[Case("3 4", "7"), Case("5 6", "11")])
    return grade("print(sum(map(int, input().split())))", "py", tests, seed=0, limits=LIMITS).reason


def belongings() -> set[str]:
    """Descriptors, children, temporary files and control groups of this process."""
    children = psutil.Process().children(recursive=True)
    found = {f"process {child.pid} {child.name()}" for child in children}
    # Descriptors by number alone: listing them needs one.
    found |= {f"descriptor {fd}" for fd in range(3, 256) if _is_open(fd)}
    pattern = f"{tempfile.gettempdir()}/megatron_rl_sandbox_{os.getpid()}_*"
    return found | set(glob.glob(pattern))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def main(kind: str, group: str, names: list[str]) -> Report:
    """Grade the programs of a group, each followed by an ordinary one."""
    global LIMITS
    os.environ[SECRET_VARIABLE] = "secret"
    LIMITS = prepare(msgspec.structs.replace(LIMITS, isolation=kind))
    report = Report(isolation=LIMITS.isolation)
    ordinary_reason()
    with host_facts() as (facts, sockets):
        before = belongings()
        for name in names or GROUPS[group]:
            start_s = time.monotonic()
            try:
                reason = verdict_on(group, GROUPS[group][name], facts)
            except GradingError as error:
                reason = f"GradingError: {error}"
            report.reasons[name] = reason
            report.seconds[name] = time.monotonic() - start_s
            report.ordinary.append(ordinary_reason())
            report.left += [f"{name}: {thing}" for thing in sorted(belongings() - before)]
        for one in sockets:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                report.received_bytes += len(one.recv(100)) if one.type == 2 else bool(one.accept())
    return report


if __name__ == "__main__":
    print(msgspec.json.encode(main(sys.argv[1], sys.argv[2], sys.argv[3:])).decode())
