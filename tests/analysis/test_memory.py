"""Memory of an analysis is bounded by its chunks and a tensor, whatever the size of the model."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_rl.weights.folders.conversion import Request, convert
from tests.analysis.planted import plant
from tests.distributed import ROOT

pytestmark = pytest.mark.slow(35)
MEGABYTE = 10**6
CHUNK_BYTES = MEGABYTE
PROGRAM = """
import sys
from pathlib import Path
from megatron_rl.analysis.checkpoints import find_checkpoints, open_checkpoints
from megatron_rl.analysis.principal import gram_matrix
chunk_bytes, times, *folders = sys.argv[1:]
with open_checkpoints(find_checkpoints([Path(folder) for folder in folders])) as opened:
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(times)):
        gram_matrix(opened, "mean", chunk_bytes=int(chunk_bytes))
    print(opened.parameters, flush=True)
    sys.stdin.readline()
"""


def own_bytes(pid: int) -> int:
    """Resident memory that is no page of a file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [line.split() for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(found[0][1])


def growth_of(folders: list[Path], times: int = 1) -> tuple[int, int]:
    """(parameters, bytes by which a process that analyses grows, at most).

    Memory is looked at every millisecond: who is done sooner is analysed more `times`, so that its
    peak is as surely seen.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(CHUNK_BYTES), str(times), *map(str, folders)],
        cwd=ROOT,
        # Freed blocks of this size go back to the system at once.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MALLOC_MMAP_THRESHOLD_": "100000",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = peak = own_bytes(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        line, deadline = "", time.monotonic() + 60
        while not line and time.monotonic() < deadline:
            peak = max(peak, own_bytes(child.pid))
            line = child.stdout.readline()
            time.sleep(0.001)
        child.kill()
    return int(line), peak - before


def sized(folder: Path, hidden: int, layers: int) -> list[Path]:
    """Three checkpoints of a model."""
    return plant(
        folder, [(0.0,), (1.0,), (2.0,)], dtype=torch.bfloat16, hidden_size=hidden,
        intermediate_size=4 * hidden, num_hidden_layers=layers,
    )[0]  # fmt: skip


def largest_bytes(folder: Path) -> int:
    """Of the largest tensor."""
    largest = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]
            largest = max(largest, *sizes)
    return largest


def test_memory_is_flat_in_the_number_of_parameters(tmp_path: Path) -> None:
    # More layers, then wider ones too: tensors that grow are read by rows.
    small, peak = growth_of(sized(tmp_path / "small", 128, 2), times=20)
    for name, hidden, layers, factor in (("deep", 128, 20, 8), ("wide", 384, 3, 10)):
        large, found = growth_of(sized(tmp_path / name, hidden, layers))
        print(f"{small} parameters: {peak} bytes; {large}: {found}")
        assert large > factor * small
        # What a chunk needs: the values, their copy of one checkpoint, the products' copies.
        assert found <= 3 * CHUNK_BYTES
        assert found <= peak + MEGABYTE / 2


def test_a_megatron_folder_costs_two_tensors_more(tmp_path: Path) -> None:
    folders = sized(tmp_path, 320, 6)
    for number, folder in enumerate(folders):
        convert(Request(folder, tmp_path / f"megatron_{number}"), lambda done, total: None)
    converted = [tmp_path / f"megatron_{number}" for number in range(3)]
    # Megatron keeps gate_proj and up_proj in one tensor.
    fused_bytes = 2 * largest_bytes(folders[0])
    parameters, found = growth_of(converted)
    bound_bytes = 3 * CHUNK_BYTES + 2 * fused_bytes + 2 * MEGABYTE
    print(f"{parameters} parameters: {found} bytes of {bound_bytes}")
    assert 3 * 2 * parameters > 5 * bound_bytes
    assert found <= bound_bytes
