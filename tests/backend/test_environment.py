"""Which variables a process of a run gets, by the device that it computes on."""

import pytest

from megatron_rl.backend.environment import (
    collective_environment,
    device_of_host,
    role_environment,
    trainer_environment,
)
from megatron_rl.config.files import load_config
from megatron_rl.launcher.supervisor import child_environment

CPU_ONLY = {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}


def test_compiled_graphs_and_threads_are_withheld_on_the_cpu_alone() -> None:
    assert role_environment("cpu") == {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert role_environment("cuda") == {}
    # What every process gets does not bring them back.
    assert not CPU_ONLY & child_environment().keys()


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


def test_trainer_ranks_on_cuda_grow_their_segments() -> None:
    grown = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert trainer_environment("cuda", expandable_segments=True, given={}) == grown
    assert trainer_environment("cuda", expandable_segments=False, given={}) == {}
    cpu = trainer_environment("cpu", expandable_segments=True, given={})
    assert cpu == role_environment("cpu")
    # What the user has set counts more, under torch's old name and its new one.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        given = {name: "max_split_size_mb:256"}
        assert trainer_environment("cuda", expandable_segments=True, given=given) == {}


def test_memory_that_engines_open_is_not_of_such_segments() -> None:
    assert load_config(None, []).has_expandable_segments
    assert not load_config(None, ["train.expandable_segments=false"]).has_expandable_segments
    assert not load_config(None, ["weights.method=ipc"]).has_expandable_segments


def test_collectives_of_a_run_on_loopback_stay_there() -> None:
    assert collective_environment("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert collective_environment("10.0.0.7", {}) == {}
    assert collective_environment("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}) == {}
