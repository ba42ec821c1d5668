"""Describes a node with GPUs for a table."""

import importlib.metadata
import subprocess
from collections import Counter

PACKAGES = ("torch", "nvidia-nccl-cu13", "transformer-engine", "megatron-core", "sglang")
_TIMEOUT_S = 30.0


def hardware() -> str:
    """GPUs and driver, such as "1 x NVIDIA H100 80GB HBM3, driver 580.65.06"."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"no GPU ({type(error).__name__} of nvidia-smi)"
    gpus = Counter(line.strip().replace(", ", ", driver ") for line in said.splitlines())
    return "; ".join(f"{count} x {gpu}" for gpu, count in gpus.items())


def versions() -> str:
    """Versions of PACKAGES."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
