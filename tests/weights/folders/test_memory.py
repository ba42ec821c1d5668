"""A conversion's memory is bounded by its files and its largest tensor, not by the model."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import ROOT
from tests.tiny_models import write_model

MEGABYTE = 10**6
SHARD_BYTES = 8 * MEGABYTE
PROGRAM = """
import sys
from pathlib import Path
from megatron_rl.weights.folders.conversion import Request, convert
source, target, to, shard_bytes = sys.argv[1:]
request = Request(Path(source), Path(target), to=to, verify=True, shard_bytes=int(shard_bytes))
print("ready", flush=True)
sys.stdin.readline()
convert(request, lambda done, total: None)
"""


def own_bytes(pid: int) -> int:
    """Resident memory that is no page of a file; of a process that ended, 0."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    found = [line.split() for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(found[0][1]) if found else 0


def growth_of(source: Path, target: Path, to: str) -> int:
    """Bytes by which the memory of a process that converts grows, at most."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source), str(target), to, str(SHARD_BYTES)],
        cwd=ROOT,
        # Freed blocks of this size go back to the system at once.
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "100000"},
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
        deadline = time.monotonic() + 90
        while child.poll() is None and time.monotonic() < deadline:
            peak = max(peak, own_bytes(child.pid))
            time.sleep(0.001)
        child.kill()
    assert child.returncode == 0
    return peak - before


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_memory_grows_by_a_shard_and_few_tensors_not_by_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    write_model(tmp_path / "a", dtype=torch.bfloat16, vocab_size=4096, **sizes)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    largest_bytes = max(tensor.nbytes for tensor in tensors.values())
    del tensors
    # A tensor as it is read and as it is written; and what reading and writing themselves take.
    bound_bytes = SHARD_BYTES + 2 * largest_bytes + 4 * MEGABYTE
    assert model_bytes > 6 * bound_bytes
    there = growth_of(tmp_path / "a", tmp_path / "m", "megatron")
    back = growth_of(tmp_path / "m", tmp_path / "b", "hf")
    print(f"model {model_bytes}, bound {bound_bytes}, grew by {there} and {back}")
    assert max(there, back) <= bound_bytes
    expected = (tmp_path / "a" / "model.safetensors").stat().st_size
    found = sum(path.stat().st_size for path in (tmp_path / "b").glob("*.safetensors"))
    assert found == pytest.approx(expected, rel=0.01)
