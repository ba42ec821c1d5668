"""What each role of a run finds in its environment, on hosts with and without GPUs."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher import phases
from megatron_rl.launcher.node import first_node
from megatron_rl.launcher.placement import place
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.launcher.run_folder import locked
from megatron_rl.protocol.node_messages import PhaseKind, RunPhase

Environments = dict[str, dict[str, str]]
CPU_SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
CORES = 16
COLLECTIVES = {
    # As the user set it.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "2",
    # expert.weights.deadline_s, rounded up.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "31",
    "GLOO_SOCKET_IFNAME": "lo",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Environments:
    """Role -> environment of its first process that would be started; none is."""
    found: Environments = {}

    class Process:
        pid = 0

        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            role = next(
                word for word in command if word.startswith(("megatron_rl.", "genera", "veri"))
            )
            found.setdefault(role.split(".")[-2], env)

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
    for name in CPU_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return found


def make_config(folder: Path) -> Config:
    sizes = ["parallel.tensor=2", "parallel.data=2", "generator.replicas=2"]
    sizes += ["expert.weights.deadline_s=30.5"]
    return load_config(None, [f"run.dir={folder}", *sizes])


def start_on(folder: Path, *, nodes: int, gpus_per_node: int) -> None:
    """What the first node starts for training, without waiting for its end."""
    config = resolve_ports(make_config(folder))
    roles = place(config, nodes=nodes, gpus_per_node=gpus_per_node)[0] if nodes > 1 else None
    with (
        locked(folder) as lock,
        first_node(config, Console(), lock, nodes=nodes, roles=roles) as node,
    ):
        phases._start_serving(node, RunPhase(1, PhaseKind.TRAINING), [])
        phases._start_ranks(node, "trainer", "megatron_rl.trainer.train", [])
        # None of them is a process.
        node.supervisor.roles.clear()


def start_on_one_node(folder: Path) -> None:
    start_on(folder, nodes=1, gpus_per_node=8)


def start_on_the_first_of_two(folder: Path) -> None:
    start_on(folder, nodes=2, gpus_per_node=5)


def settings(found: dict[str, str]) -> dict[str, str]:
    return {name: found[name] for name in CPU_SETTINGS if name in found}


WAYS = pytest.mark.parametrize("start", [start_on_one_node, start_on_the_first_of_two])


@WAYS
@pytest.mark.usefixtures("torch_for_gpus")
def test_collectives_are_set_alike_for_all_roles(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks of trainer and engine could not share a communicator."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    for name in COLLECTIVES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    start(tmp_path)
    assert started.keys() == {"rollout_queue", "verification", "generation", "trainer"}
    for role, found in started.items():
        assert COLLECTIVES.items() <= found.items(), role


@WAYS
@pytest.mark.usefixtures("torch_for_gpus")
def test_roles_that_compute_on_gpus_keep_their_threads_and_the_compiler(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    start(tmp_path)
    assert {role: settings(found) for role, found in started.items()} == {
        "rollout_queue": CPU_SETTINGS,
        "verification": CPU_SETTINGS,
        "generation": {},
        # Each of four ranks; without a word torchrun gives them one thread each.
        "trainer": {"OMP_NUM_THREADS": "4"},
    }
    # The engine's GPU comes after the trainer's four.
    assert started["generation"]["CUDA_VISIBLE_DEVICES"] == "4"


@WAYS
@pytest.mark.usefixtures("torch_for_gpus")
def test_what_the_user_said_of_threads_counts_more(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    start(tmp_path)
    assert settings(started["trainer"]) == {"OMP_NUM_THREADS": "3"}


@WAYS
def test_all_roles_of_a_host_without_gpus_take_one_thread_and_compile_nothing(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start(tmp_path)
    roles = {"rollout_queue", "verification", "generation", "trainer"}
    assert {role: settings(found) for role, found in started.items()} == dict.fromkeys(
        roles, CPU_SETTINGS
    )
