"""Which variables a process of a run gets, by the device that it computes on."""

import os
import subprocess
import sys

import pytest

from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    rank_environment,
    role_environment,
)
from megatron_rl.launcher.supervisor import child_environment

CPU_ONLY = {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}


def test_compiled_graphs_and_threads_are_withheld_on_the_cpu_alone() -> None:
    assert role_environment("cpu") == {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert role_environment("cuda") == {}
    # What every process gets does not bring them back.
    assert not CPU_ONLY & child_environment().keys()


STEPS = """
import resource, torch
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    # As a pass leaves its tensors: made in one thread and in autograd's, none of them kept.
    x = torch.ones(1 << 24, requires_grad=True)
    (x.exp() * x.cos()).sum().backward()
for _ in range(5): step()
before = faults()
for _ in range(10): step()
print((faults() - before) / 10)
"""


def test_a_rank_on_the_cpu_keeps_the_memory_that_its_steps_take_in_turn() -> None:
    assert rank_environment("cuda") == {}
    mine = rank_environment("cpu")
    assert mine.items() >= role_environment("cpu").items()
    pages = (1 << 26) / os.sysconf("SC_PAGE_SIZE")  # of one of a step's tensors
    faults = {}
    for name, values in (("plain", role_environment("cpu")), ("mine", mine)):
        command = [sys.executable, "-c", STEPS]
        given = os.environ | values
        faults[name] = float(subprocess.check_output(command, env=given, text=True, timeout=120))
    # By itself the C library has the system clear several of them anew in each step.
    assert faults["plain"] > 2 * pages and faults["mine"] < faults["plain"] / 10


@pytest.mark.parametrize(
    ("gpus", "torch_version", "device"),
    [
        ([], "2.11.0", "cpu"),
        (["0", "1"], "2.11.0", "cuda"),
        (["0"], "2.11.0+cu130", "cuda"),
        (["0"], "2.13.0+cpu", "cpu"),
    ],
)
def test_device_of_a_host_is_what_it_lists_and_torch_was_built_for(
    gpus: list[str], torch_version: str, device: str
) -> None:
    assert device_of_host(gpus, torch_version) == device


def test_collectives_of_a_run_on_loopback_stay_there() -> None:
    assert collective_environment("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert collective_environment("10.0.0.7", {}) == {}
    assert collective_environment("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}) == {}
