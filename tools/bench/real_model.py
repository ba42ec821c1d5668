"""The real model of the benchmarks, SmolLM2-135M-Instruct, in the cache that the quickstart uses.

Used by tools.bench.generate and by the workload `real` of tools.bench.end_to_end.
"""

import sys
from pathlib import Path

from tools.bench.children import run_child
from tools.bench.variants import ROOT

_TIMEOUT_S = 900.0
CACHE = ROOT / ".cache"


def smollm2() -> Path:
    """Its folder in bfloat16, made where it is absent. Raises ChildFailed."""
    folder = CACHE / "smollm2-135m-instruct"
    _run("convert_smollm2", [folder])
    return folder


def smollm2_padded() -> Path:
    """The same with heads of zeros, so that two tensor-parallel ranks divide them."""
    folder = CACHE / "smollm2-135m-instruct-tp2"
    _run("pad_heads", [smollm2(), folder, "--multiple", "2"])
    return folder


def _run(tool: str, arguments: list[str | Path]) -> None:
    command = [sys.executable, "-m", f"tools.{tool}", *arguments]
    run_child(command, log=CACHE / "bench" / f"{tool}.log", timeout_s=_TIMEOUT_S, cwd=ROOT)
