"""Imports every component and prints its version: `python -m tools.versions [cpu|gpu]`.

Runs in no process of a run; tools/install.sh ends with it. SGLang on CPU is imported in a child
with the environment that only it gets.
"""

import argparse
import concurrent.futures
import contextlib
import importlib
import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from generation.sglang_cpu import server_environment

SGLANG_MODULE = "sglang.srt.entrypoints.http_server"
CHILD_TIMEOUT_S = 600
"""On a host that others keep busy the import takes minutes; what is installed is sound then."""

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
    """A component cannot be imported; the text names it and shows why."""


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


def import_sglang_on_cpu() -> str:
    """SGLang's version after importing its server in a child. Raises ComponentError."""
    try:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import {SGLANG_MODULE}"],
            env=os.environ | server_environment(tensor_parallel=1),
            check=True,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ComponentError(f"sglang: the import took over {CHILD_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        raise ComponentError(f"sglang: import {SGLANG_MODULE}:\n{error.stderr[-3000:]}") from error
    return importlib.metadata.version("sglang")


def version_table(mode: str) -> list[str]:
    """One line a component: name, version, seconds of import. Raises ComponentError."""
    lines = [_row("python", platform.python_version(), None)]
    components = COMMON | (GPU_ONLY if mode == "gpu" else {})
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        # The slowest import has a process of its own, so it takes the other core.
        sglang = pool.submit(_timed, import_sglang_on_cpu) if mode == "cpu" else None
        for package, module in components.items():
            lines.append(_row(package, *_timed(import_component, package, module)))
        if sglang:
            lines.append(_row("sglang", *sglang.result()))
    return lines


def _timed(load: Callable[..., str], *arguments: str) -> tuple[str, float]:
    started = time.monotonic()
    return load(*arguments), time.monotonic() - started


def _row(package: str, version: str, seconds: float | None) -> str:
    note = "" if seconds is None else f"imported in {seconds:.1f} s"
    return f"  {package:<20}{version:<14}{note}".rstrip()


def main() -> None:
    """Command line."""
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
