"""Imports every component and prints its version: `python -m tools.versions [cpu|gpu]`.

The last step of tools/install.sh. A sub-process imports the component with special environment
variables: SGLang on the CPU, a trainer rank on GPUs.
"""

import argparse
import concurrent.futures
import contextlib
import importlib
import importlib.metadata
import io
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from megatron_rl.backend.cpu.sglang import server_environment
from megatron_rl.backend.environment import DEVICE_OF_MODE, ranks_environment
from megatron_rl.cli.doctor import RANK_MODULE, find_import_fault

SGLANG_MODULE = "sglang.srt.entrypoints.http_server"
COMMON = {
    "torch": "torch",
    "megatron-core": "megatron.core.models.gpt.gpt_model",
    "transformers": "transformers.models.llama.modeling_llama",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors.torch",
    "numpy": "numpy",
    "gguf": "gguf",
    "pyzmq": "zmq",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "math-verify": "math_verify",
    "python-flint": "flint",
    "reasoning_gym": "reasoning_gym",
    "rich": "rich.live",
    "pytest": "pytest",
}
GPU_ONLY = {"transformer-engine": "transformer_engine.pytorch", "sglang": SGLANG_MODULE}


class ComponentError(RuntimeError):
    """A component cannot be imported; the text has its name and the error."""


def import_component(package: str, module: str) -> str:
    """Version of `package` after importing `module`. Raises ComponentError."""
    noise = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(noise):
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ComponentError(f"{package}: import {module}: {error}\n{noise.getvalue()}") from error
    return importlib.metadata.version(package)


def child_of(mode: str) -> tuple[str, str, dict[str, str]]:
    """(package, module, variables) of the import in a sub-process."""
    if mode == "cpu":
        return "sglang", SGLANG_MODULE, server_environment(tensor_parallel=1)
    return "megatron-rl", RANK_MODULE, ranks_environment(DEVICE_OF_MODE[mode], 1)


def import_in_child(package: str, module: str, variables: dict[str, str]) -> str:
    """`import_component` in a sub-process with these variables."""
    if fault := find_import_fault(module, variables):
        raise ComponentError(f"{package}: import {module}: {fault}")
    return importlib.metadata.version(package)


def version_table(mode: str) -> list[str]:
    """A line per component: name, version, seconds of import. Raises ComponentError."""
    lines = [_row("python", platform.python_version(), None)]
    components = COMMON | (GPU_ONLY if mode == "gpu" else {})
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        # The slowest import runs in a sub-process, on another core.
        name, *what = child_of(mode)
        child = pool.submit(_timed, import_in_child, name, *what)
        for package, module in components.items():
            lines.append(_row(package, *_timed(import_component, package, module)))
        lines.append(_row(name, *child.result()))
    return lines


def _timed(load: Callable[..., str], *arguments: str) -> tuple[str, float]:
    started = time.monotonic()
    return load(*arguments), time.monotonic() - started


def _row(package: str, version: str, seconds: float | None) -> str:
    note = "" if seconds is None else f"imported in {seconds:.1f} s"
    return f"  {package:<20}{version:<14}{note}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", nargs="?", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    # Megatron-Core compiles some functions at import; on CPU that needs a compiler and time.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        lines = version_table(arguments.mode)
    except ComponentError as error:
        sys.exit(f"cannot import {error}")
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
