"""What a host needs before anything is installed or run on its GPUs: driver, compiler, C library.

`megatron-rl doctor` shows it. tools/install.sh runs this file by itself, before there is an
environment, so it needs the standard library alone; it prints the toolkit's folder, or ends with
exit code 1 after it said what is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CUDA_MAJOR = 13
"""Of the CUDA runtime that requirements/gpu.txt pins."""
MIN_DRIVER = 580
"""The oldest branch of NVIDIA's driver that runs CUDA 13."""
MIN_GLIBC = (2, 34)
"""What the wheel of the SGLang that requirements/gpu.txt pins asks for."""
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
HEADER = "include/cuda_runtime.h"
COMPILED_WITH = (HEADER, "lib64/libcudart.so")
"""What TransformerEngine and every kernel are compiled and linked with, below the toolkit."""
RUN_WITH = ("include/curand.h", "lib64/stubs/libcuda.so")
"""What engines compile when they first sample, and when their ranks first reduce."""
_TOOLKIT = (
    f"install the toolkit of CUDA {CUDA_MAJOR}.0 whole (NVIDIA's Debian package "
    "cuda-toolkit-13-0), or set CUDA_HOME to the folder of one"
)
_TIMEOUT_S = 30.0


class Finding(NamedTuple):
    """Something of a host, and whether it will do."""

    is_good: bool
    what: str
    found: str
    """With the fix where it is not good."""


def check_host(environment: Mapping[str, str]) -> list[Finding]:
    """What a host with GPUs needs; environment: where programs are looked for."""
    return [
        check_driver(environment),
        check_compiler(environment),
        check_kernels(environment),
        check_glibc(_glibc()),
    ]


def check_driver(environment: Mapping[str, str]) -> Finding:
    """A host without a driver is good enough to make an image on."""
    what = "NVIDIA driver"
    program = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    if program is None:
        return Finding(True, what, "absent: nothing will run on GPUs here")
    fix = f"CUDA {CUDA_MAJOR} needs {MIN_DRIVER} or newer: install a newer driver"
    output = _output(program, "--query-gpu=driver_version", "--format=csv,noheader")
    if (release := re.search(r"\d+(\.\d+)+", output)) is None:
        said = repr(" ".join(output.split())) if output.strip() else "nothing"
        return Finding(False, what, f"nvidia-smi said {said}, and no release. {fix}")
    is_good = int(release.group().split(".")[0]) >= MIN_DRIVER
    return Finding(is_good, what, release.group() if is_good else f"{release.group()}; {fix}")


def check_compiler(environment: Mapping[str, str]) -> Finding:
    """nvcc: TransformerEngine is built with it, and kernels of SGLang and FlashInfer once used."""
    what, home = f"nvcc {CUDA_MAJOR}", find_cuda_home(environment)
    program, fix = home / "bin" / "nvcc", _TOOLKIT
    if not os.access(program, os.X_OK):
        return Finding(False, what, f"no {program}; {fix}")
    if missing := _missing(home, COMPILED_WITH):
        return Finding(False, what, f"{home} lacks {missing}: nothing can be linked there; {fix}")
    release = re.search(r"release (\d+)\.(\d+)", _output(str(program), "--version"))
    if release is None or int(release.group(1)) != CUDA_MAJOR:
        named = "no release" if release is None else release.group()
        return Finding(False, what, f"{program} says {named}; {fix}")
    return Finding(True, what, f"{program}, {release.group()}")


def check_kernels(environment: Mapping[str, str]) -> Finding:
    """Files of the toolkit that engines compile with. An image may be made without them."""
    what, home = "toolkit for engines", find_cuda_home(environment)
    missing = _missing(home, RUN_WITH)
    if not missing:
        return Finding(True, what, str(home))
    has_driver = shutil.which("nvidia-smi", path=environment.get("PATH", "")) is not None
    text = f"{home} lacks {missing}: an engine would stop at its first request; {_TOOLKIT}"
    return Finding(not has_driver, what, text)


def _missing(home: Path, names: Sequence[str]) -> str:
    return " and ".join(name for name in names if not (home / name).exists())


def check_glibc(said: str) -> Finding:
    """said: such as "glibc 2.36"; "" where there is another C library."""
    what, needed = "C library", ".".join(map(str, MIN_GLIBC))
    fix = (
        f"SGLang needs glibc {needed} or newer, as Ubuntu 22.04, Debian 12 and RHEL 9 have it: "
        "take such a system, or an image of one (Dockerfile)"
    )
    release = re.fullmatch(r"glibc (\d+)\.(\d+).*", said)
    if release is None:
        return Finding(False, what, f"{said or 'not glibc'}; {fix}")
    is_good = tuple(map(int, release.groups())) >= MIN_GLIBC
    return Finding(is_good, what, said if is_good else f"{said}; {fix}")


def _glibc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def find_cuda_home(environment: Mapping[str, str]) -> Path:
    """The toolkit's folder, where torch, FlashInfer and SGLang would look for it.

    An nvcc on PATH may be a script that starts another one: no headers are near it then.
    """
    if given := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return Path(given)
    program = shutil.which("nvcc", path=environment.get("PATH", ""))
    home = Path(program).parent.parent if program else DEFAULT_CUDA_HOME
    is_wrapper = not (home / HEADER).exists() and (DEFAULT_CUDA_HOME / HEADER).exists()
    return DEFAULT_CUDA_HOME if is_wrapper else home


def _output(*command: str) -> str:
    """What a program prints; its errors too."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout


def main() -> None:
    """Command line, without arguments."""
    found = check_host(os.environ)
    for finding in found:
        print(f"{finding.what}: {finding.found}", file=sys.stderr)  # noqa: T201
    if not all(finding.is_good for finding in found):
        sys.exit(1)
    print(find_cuda_home(os.environ))  # noqa: T201


if __name__ == "__main__":
    main()
