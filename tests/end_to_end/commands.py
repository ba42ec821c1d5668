"""A command of the launcher as a child of a test; shared by tests of whole runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def launched(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`megatron-rl ...`; it and its processes are ended with the block."""
    run = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.launcher.cli", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield run
    finally:
        if run.poll() is None:
            run.terminate()
            run.communicate(timeout=30)
