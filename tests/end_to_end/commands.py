"""A command of the launcher as a child of a test, and its inputs; for tests of whole runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def write_inputs(folder: Path, config: str, *, train: int, held_out: int = 0) -> Path:
    """A tiny model, prompts, and config.toml, in which FOLDER stands for the folder; its path."""
    make = [sys.executable, "-m", "tools.make_tiny_model", str(folder / "model")]
    subprocess.run(make, cwd=ROOT, check=True, timeout=200)
    rows = [
        {
            "task": "any_text", "messages": [{"role": "user", "content": f"{number}="}],
            "answer": "1", "split": "train" if number < train else "held_out",
        }
        for number in range(train + held_out)
    ]  # fmt: skip
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "config.toml"
    path.write_text(config.replace("FOLDER", str(folder)))
    return path


def start(*arguments: object, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`megatron-rl ...`, behind the words of `before`."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "megatron_rl.cli.main", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@contextmanager
def launched(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`megatron-rl ...`; it and its processes are ended with the block."""
    run = start(*arguments)
    try:
        yield run
    finally:
        if run.poll() is None:
            # The second signal: not after a checkpoint.
            for _ in range(2):
                run.terminate()
                time.sleep(0.5)
            run.communicate(timeout=60)


def wait_until(
    is_true: Callable[[], bool], run: subprocess.Popen[str], *, within_s: float = 250
) -> None:
    """Wait for something while a run goes on."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
