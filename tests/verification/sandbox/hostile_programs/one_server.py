"""Runs hostile programs one after another in one sandbox, a right program after each.

`python -m tests.verification.sandbox.hostile_programs.one_server KIND TABLE [NAME...]`, with all
programs of the table if none is named. What a program may break for the next one is its sandbox's
server, so one server for all proves more than a sandbox each, in a tenth of the time. A process of
its own, so that it can run as any user. Prints Trials as JSON.
"""

import contextlib
import json
import os
import sys

import msgspec
import pyseccomp

from tests.verification.sandbox.hostile_programs import (
    compilers,
    native_calls,
    states,
    system_calls,
)
from tests.verification.sandbox.hostile_programs.run import REPOSITORY, belongings, host_facts
from verification.code.grading import CodeLimits
from verification.code.languages import LANGUAGES, compile_command
from verification.code.setup import limits_of_compiler, limits_of_test, open_sandbox, prepare
from verification.sandbox import isolation
from verification.sandbox.sandbox import ProgramResult, Sandbox
from verification.verdict import GradingError

TABLES = {
    "refused": system_calls.REFUSED_PROGRAMS,
    "arguments": system_calls.ARGUMENT_PROGRAMS,
    "signals": system_calls.SIGNAL_PROGRAMS,
    "random": system_calls.RANDOM_PROGRAMS,
    "descriptors": states.DESCRIPTOR_PROGRAMS,
    "host_files": states.HOST_FILE_PROGRAMS,
    "states": states.STATE_PROGRAMS,
    "endings": states.ENDING_PROGRAMS,
    "native": native_calls.PROGRAMS,
    "compilers": compilers.PROGRAMS,
}
RIGHT = """
import os, threading
thread = threading.Thread(target=lambda: open("x", "w").close() if FOLDER else None)
thread.start(); thread.join()
print(sum(map(int, input().split())), len(os.listdir(".")) if FOLDER else 0)
"""
HOSTILE_LIMITS = CodeLimits(test_s=0.5, compile_s=0.5, wall_factor=1.4)
RIGHT_LIMITS = CodeLimits(test_s=10.0)


class Trial(msgspec.Struct):
    """What came of one program and of the right one after it."""

    output: str = ""
    errors: str = ""
    exit_code: int = 0
    is_late: bool = False
    failure: str = ""
    """Our own failure to run either, which a program must not be able to cause."""
    is_next_right: bool = False
    left: list[str] = []
    """Processes, descriptors and files that it left behind."""
    changed: list[str] = []
    """What it changed in a file of the host that its user owns."""


class Trials(msgspec.Struct):
    """What came of a table."""

    isolation: str
    programs: dict[str, Trial]


def numbers() -> dict[str, int]:
    """Numbers of the system calls that libseccomp knows, of those in the tables."""
    found = {}
    for name in system_calls.NAMES:
        with contextlib.suppress(ValueError):
            number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
            # Negative: another architecture's.
            if number >= 0:
                found[name] = number
    return found


class Bench:
    """One sandbox for many programs, opened anew only after a failure."""

    def __init__(self, kind: str, table: str, facts: dict[str, object]) -> None:
        self._limits = prepare(msgspec.structs.replace(HOSTILE_LIMITS, isolation=kind))
        self.isolation = self._limits.isolation
        self._table = table
        self._facts = facts
        self._has_folder = kind != "landlock"
        self._sandbox: Sandbox | None = None

    def __enter__(self) -> "Bench":
        self._outside = belongings()
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._sandbox is not None
        self._sandbox.close()

    def _open(self) -> None:
        name = "cpp" if self._table == "native" else "python"
        self._sandbox = open_sandbox(name, self._limits)
        if self._table == "native":
            language = LANGUAGES["cpp"]
            command = compile_command(language, "")
            limits = limits_of_compiler(CodeLimits(compile_s=60.0))
            source = native_calls.SOURCE.encode()
            result = self._sandbox.compile(
                command, source, source_name=language.source_name, limits=limits
            )
            assert result.endings[0].exit_code == 0, result.output.decode()
        # Children of bwrap and the like have started once a program has run.
        assert self._is_next_right()
        self._standing = belongings()

    def attack(self, trial: Trial, source: str) -> None:
        """Run a program and a right one; a GradingError goes into the trial."""
        try:
            result = self._run(source)
            trial.output = result.output.decode(errors="replace")[:2000]
            trial.errors = result.errors
            trial.exit_code = result.endings[0].exit_code
            trial.is_late = result.is_late
            trial.is_next_right = self._is_next_right()
        except GradingError as error:
            trial.failure = str(error)
        trial.left = sorted(belongings() - self._standing)
        # A sandbox compiles once; only where it mounts a folder each time, it can do more.
        if trial.failure or (self._table == "compilers" and not self._has_folder):
            self.__exit__()
            trial.left += sorted(belongings() - self._outside)
            self._open()

    def _run(self, source: str) -> ProgramResult:
        assert self._sandbox is not None
        limits = limits_of_test(self._limits)
        facts = json.dumps(self._facts).encode()
        if self._table == "compilers":
            return self._take_over_the_compiler(source)
        if self._table == "native":
            command = [f"{self._sandbox.build_folder}/solution", source]
            return self._sandbox.run(command, b"", stdin=facts, limits=limits)
        code = (system_calls.PRELUDE + source).encode("utf-8", "surrogatepass")
        return self._sandbox.run(None, code, stdin=facts, limits=limits)

    def _take_over_the_compiler(self, source: str) -> ProgramResult:
        assert self._sandbox is not None
        for_anyone = isolation.is_root() and self.isolation != "bubblewrap"
        python = isolation.roots(for_anyone=for_anyone).interpreter.executable
        command = [python, "-I", "-S", "solution.py", str(self._facts["file"])]
        code = (compilers.PRELUDE + source).encode()
        limits = limits_of_compiler(HOSTILE_LIMITS)
        return self._sandbox.compile(command, code, source_name="solution.py", limits=limits)

    def _is_next_right(self) -> bool:
        assert self._sandbox is not None
        right = f"FOLDER = {self._has_folder}\n{RIGHT}".encode()
        limits = limits_of_test(RIGHT_LIMITS)
        result = self._sandbox.run(None, right, stdin=b"3 4", limits=limits)
        return result.output.split() == [b"7", str(int(self._has_folder)).encode()]


def file_state(path: str) -> dict[str, object]:
    """All of a file that a program could change."""
    status = os.stat(path)
    with open(path, "rb") as file:
        content = file.read()
    return {
        "content": content, "mode": status.st_mode, "owner": status.st_uid,
        "modified": status.st_mtime_ns, "links": status.st_nlink,
    }  # fmt: skip


def main(kind: str, table: str, names: list[str]) -> Trials:
    """Attack with the programs of a table."""
    trials: dict[str, Trial] = {}
    with host_facts() as (facts, _):
        path = str(facts["file"])
        facts |= {"numbers": numbers(), "repository": str(REPOSITORY)}
        with Bench(kind, table, facts) as bench:
            for name in names or TABLES[table]:
                trial = trials[name] = Trial()
                before = file_state(path)
                bench.attack(trial, TABLES[table][name])
                after = file_state(path)
                trial.changed = [key for key in after if after[key] != before[key]]
            return Trials(bench.isolation, trials)


if __name__ == "__main__":
    print(msgspec.json.encode(main(sys.argv[1], sys.argv[2], sys.argv[3:])).decode())
