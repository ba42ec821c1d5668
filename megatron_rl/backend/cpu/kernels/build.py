"""Compiles a C++ source of this folder into a shared library, once a machine, and loads it.

Used by trainer ranks and engine ranks. Sources use no header of torch: one compiles in a second
or two and fits any release. `python -m megatron_rl.backend.cpu.kernels.build` compiles all, so that
no run waits for it.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
COMPILER = "g++"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    # Lets loops marked so be vectorised; no -ffast-math, which would not keep NaN and infinity.
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
)
TIMEOUT_S = 300.0


class CompilerFailed(RuntimeError):
    """There is no compiler, or it refused the source; the text says which."""


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library of `NAME.cpp`. Raises CompilerFailed."""
    source = FOLDER / f"{name}.cpp"
    path = _folder() / f"{name}-{_fingerprint(source)}.so"
    if not path.exists():
        _compile_once(source, path)
    return ctypes.CDLL(str(path))


def names() -> list[str]:
    """Of all sources."""
    return sorted(source.stem for source in FOLDER.glob("*.cpp"))


def _folder() -> Path:
    """Where libraries are kept: in the virtual environment, or else in the user's cache."""
    inside = Path(sys.prefix) / "megatron-rl-kernels"
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return inside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron-rl" / "kernels"


def _fingerprint(source: Path) -> str:
    """Changes with the source, its headers, the flags, the compiler and the processor."""
    parts = [*(path.read_bytes() for path in [source, *sorted(FOLDER.glob("*.h"))])]
    parts += [" ".join(FLAGS).encode(), _compiler_version().encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.cache
def _compiler_version() -> str:
    # Not by running it: every process that loads a library asks.
    found = shutil.which(COMPILER)
    if found is None:
        return "none"
    resolved = Path(found).resolve()
    return f"{resolved} {resolved.stat().st_mtime_ns}"


@functools.cache
def _processor() -> str:
    """What -march=native depends on: a folder may be shared by hosts that differ."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    kept = [re.search(rf"^{key}\s*: (.*)$", text, re.M) for key in ("model name", "flags")]
    return " ".join(match.group(1) for match in kept if match) or platform.machine()


def _compile_once(source: Path, path: Path) -> None:
    """Processes that start together wait for the first of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _compile(source, made)
            made.replace(path)


def _compile(source: Path, made: Path) -> None:
    command = [COMPILER, *FLAGS, "-o", str(made), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise CompilerFailed(
            f"{COMPILER} is not installed, and {source.name} needs it: install the package g++"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CompilerFailed(f"{' '.join(command)}: not done after {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise CompilerFailed(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")


def main() -> None:
    """Compile every source and print its name."""
    try:
        for name in names():
            load(name)
            sys.stdout.write(f"{name}: ready in {_folder()}\n")
    except CompilerFailed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
