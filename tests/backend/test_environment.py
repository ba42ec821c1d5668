"""Which variables a process of a run gets, by the device that it computes on."""

import sys

import pytest

from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    role_environment,
)
from megatron_rl.launcher.supervisor import child_environment

CPU_ONLY = {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}


def test_compiled_graphs_and_threads_are_withheld_on_the_cpu_alone() -> None:
    assert role_environment("cpu") == {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert role_environment("cuda").keys() == {"PATH"}
    # What every process gets does not bring them back.
    assert not CPU_ONLY & child_environment().keys()


def test_what_is_compiled_on_gpu_hosts_finds_the_environments_own_ninja(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an environment that nobody activated, too."""
    monkeypatch.setattr(sys, "executable", "/somewhere/.venv/bin/python")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert role_environment("cuda") == {"PATH": "/somewhere/.venv/bin:/usr/bin:/bin"}


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
