"""Makes vLLM's virtual environment inside .venv, where the engine vllm finds it.

Used by `bash tools/install.sh cpu --with vllm`. An existing environment is kept.
"""

import shutil
import sys
from pathlib import Path

from tools.bench.children import VLLM_PINS, ChildFailed, make_venv

NEEDED_BYTES = 5 << 30
"""The environment takes 3.1 GiB, unpacking the rest."""


def main() -> None:
    """Command line, without arguments."""
    folder = Path(sys.prefix) / "vllm"
    if sys.prefix == sys.base_prefix:
        raise SystemExit("run it by the interpreter of .venv: .venv/bin/python")
    free = shutil.disk_usage(sys.prefix).free
    if not folder.exists() and free < NEEDED_BYTES:
        raise SystemExit(f"{folder} needs {NEEDED_BYTES >> 20} MiB, {free >> 20} MiB are free")
    try:
        python = make_venv(folder, VLLM_PINS)
    except ChildFailed as error:
        raise SystemExit(str(error)) from error
    print(f"vLLM is ready: {python}")


if __name__ == "__main__":
    main()
