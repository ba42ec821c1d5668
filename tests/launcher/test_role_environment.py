"""What each role of a run finds in its environment, on hosts with and without GPUs."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_rl.backend import environment
from megatron_rl.backend.environment import collective_environment
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher import node_phases, nodes
from megatron_rl.launcher.node_link import FirstNode, HostLink
from megatron_rl.launcher.node_phases import Share
from megatron_rl.launcher.placement import place
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.launcher.run_folder import locked
from megatron_rl.launcher.session import Session
from megatron_rl.launcher.supervisor import Supervisor
from megatron_rl.protocol.node_messages import PhaseKind, RunPhase

Environments = dict[str, dict[str, str]]
CPU_SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
CORES = 16


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Environments:
    """Role -> environment of each process that is started; none is."""
    found: Environments = {}

    class Process:
        pid = 0

        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            role = next(
                word for word in command if word.startswith(("megatron_rl.", "genera", "veri"))
            )
            found[role.split(".")[-2]] = env

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
    for name in CPU_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return found


def make_config(folder: Path) -> Config:
    sizes = ["parallel.tensor=2", "parallel.data=2", "generator.replicas=2"]
    return load_config(None, [f"run.dir={folder}", *sizes])


def start_on_one_host(folder: Path) -> None:
    config = make_config(folder)
    with locked(folder) as lock:
        session = Session(config, Console(), lock=lock)
        session._supervisor.log_dir.mkdir(parents=True)
        roles = place(config, nodes=1, gpus_per_node=8)[0]
        path = session.config_path
        session.start("queue", "megatron_rl.rollout_queue.server", path)
        session.start("generator-0", "generation.worker", path, gpus=roles.engines[0])
        session.start("verifier-0", "verification.worker", path)
        session.start_ranks("trainer", "megatron_rl.trainer.train", [])


def start_on_the_first_of_two(folder: Path) -> None:
    config, gpus = make_config(folder), [str(gpu) for gpu in range(5)]
    roles = place(config, nodes=2, gpus_per_node=5)[0]
    (folder / "logs").mkdir(parents=True)
    supervisor = Supervisor(folder / "logs")
    # It says nothing to the other nodes here.
    share = Share(config, roles, 0, gpus, supervisor, HostLink.__new__(FirstNode))
    node_phases._start_serving(share, RunPhase(1, PhaseKind.TRAINING))
    node_phases._start_ranks(share, "trainer", is_supervised=False, arguments=())


def settings(found: dict[str, str]) -> dict[str, str]:
    return {name: found[name] for name in CPU_SETTINGS if name in found}


def start_by_the_host_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `megatron-rl node` starts in a phase, without waiting for its end."""
    config, gpus = resolve_ports(make_config(folder)), [str(gpu) for gpu in range(8)]
    roles = place(config, nodes=1, gpus_per_node=8)[0]
    (folder / "logs").mkdir(parents=True)

    def start_all(share: Share, link: HostLink, is_resumed: bool) -> None:
        node_phases._start_serving(share, RunPhase(1, PhaseKind.TRAINING))
        node_phases._start_ranks(share, "trainer", is_supervised=False, arguments=())
        # None of them is a process.
        share.supervisor.roles.clear()

    monkeypatch.setattr(nodes, "_placed", lambda *_, **__: (config, roles, gpus))
    monkeypatch.setattr(nodes, "lead", start_all)
    monkeypatch.setattr(nodes, "conclude", lambda *_: None)
    nodes.run_node(folder, Console(), node=0, nodes=1, gpus_per_node=8)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_collectives_are_set_alike_for_all_roles(
    is_prepared: bool, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks of trainer and engine could not share a communicator."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(environment, "version", lambda package: "2.14.1")
    if is_prepared:
        start_by_the_host_command(tmp_path, monkeypatch)
    else:
        start_on_one_host(tmp_path)
    config = make_config(tmp_path)
    expected = collective_environment(config.ports.host, config.weights.deadline_s)
    assert {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "GLOO_SOCKET_IFNAME"} <= expected.keys()
    assert started.keys() == {"rollout_queue", "verification", "generation", "trainer"}
    for role, found in started.items():
        assert expected.items() <= found.items(), role


WAYS = pytest.mark.parametrize("start", [start_on_one_host, start_on_the_first_of_two])


@WAYS
def test_roles_that_compute_on_gpus_keep_their_threads_and_the_compiler(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(environment, "version", lambda package: "2.14.1")
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
def test_what_the_user_said_of_threads_counts_more(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(environment, "version", lambda package: "2.14.1")
    start(tmp_path)
    assert settings(started["trainer"]) == {"OMP_NUM_THREADS": "3"}


@WAYS
def test_all_roles_of_a_host_without_gpus_take_one_thread_and_compile_nothing(
    start: Any, tmp_path: Path, started: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(environment, "version", lambda package: "2.14.1+cpu")
    start(tmp_path)
    roles = {"rollout_queue", "verification", "generation", "trainer"}
    assert {role: settings(found) for role, found in started.items()} == dict.fromkeys(
        roles, CPU_SETTINGS
    )
