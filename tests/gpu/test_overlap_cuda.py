"""Weight syncs beside a trainer that computes on a GPU; rows of docs/gpu-evidence.md.

The syncer, weight clients and engine ranks are the product's; all processes share one GPU.
`sync` compares every element that a generator serves with the version's.
"""

import time
from pathlib import Path

import pytest
import torch

from megatron_rl.weights.exchange.memory import SideStream, synchronize
from tests.weights.plays import sync, versions
from tests.weights.scripted_generators import Generator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("method", ["folder", "ipc"])
def test_versions_travel_while_the_trainer_computes(tmp_path: Path, method: str) -> None:
    generators = [Generator(name, device="cuda") for name in "ab"]
    script = "sync 0, start 1, compute 1, join 0, spoil 9, start 2, compute 1, join 0"
    # Memory of another device cannot be opened: under ipc the trainer is one rank on this GPU.
    layout = {"tensor": 2} if method == "folder" else {}
    steps, notes = sync(
        tmp_path, generators, script, method=method, device="cuda", deadline_s=30, **layout
    )
    assert all(step.failed == {} for step in steps)
    for name in "ab":
        assert versions(notes[name]) == [0, 1, 2]
    # They had travelled before the join, beside products that filled the trainer's own stream.
    assert steps[2].announced == (1,) and steps[3].seconds < 0.5


def test_a_side_stream_waits_for_what_was_queued_and_not_for_what_comes_later() -> None:
    device = torch.device("cuda", 0)
    factor = torch.randn(8192, 8192, device=device) / 8192
    value, result = torch.zeros(1 << 20, device=device), factor
    for _ in range(20):
        result = result @ factor
    value.fill_(7.0)
    stream = SideStream(device)
    stream.begin()
    for _ in range(2000):
        result = result @ factor
    main = torch.accelerator.current_stream(device)
    try:
        stream.enter()
        started = time.monotonic()
        copied = value.to("cpu")
        synchronize(device)
        waited_s = time.monotonic() - started
        is_busy = not main.query()
    finally:
        torch.accelerator.set_stream(main)
    main.synchronize()
    whole_s = time.monotonic() - started
    # 20 of 2,020 products came first.
    assert is_busy and bool((copied == 7.0).all())
    assert waited_s < 0.2 * whole_s, (waited_s, whole_s)
