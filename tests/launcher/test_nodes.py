"""Bad input of `megatron-rl prepare | node`, and what torchrun is told on each node."""

from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config, PortsConfig
from megatron_rl.launcher import nodes as cluster
from megatron_rl.launcher.phases import engine_command, torchrun_arguments
from megatron_rl.launcher.placement import EngineNode, place


def test_bad_input_is_refused_before_a_run_is_prepared(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}/run", "model.path=nowhere"])
    with pytest.raises(InputError, match="nowhere: there is no such folder"):
        cluster.prepare(config, Console())
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("torch_for_gpus")
def test_a_node_needs_a_prepared_run_its_place_and_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="is no prepared run"):
        cluster.run_node(tmp_path, Console(), node=0, nodes=2, gpus_per_node=1)
    (tmp_path / "config.toml").write_text(dump_toml(Config()))
    with pytest.raises(InputError, match="nodes are counted from 0"):
        cluster.run_node(tmp_path, Console(), node=2, nodes=2, gpus_per_node=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match="lists 0 GPUs: give --gpus-per-node"):
        cluster.run_node(tmp_path, Console(), node=0, nodes=2, gpus_per_node=None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InputError, match="lists 2 GPUs"):
        cluster.run_node(tmp_path, Console(), node=0, nodes=2, gpus_per_node=8)


def test_several_nodes_on_a_loopback_address_are_warned_of() -> None:
    for host, nodes, said in (("127.0.0.1", 2, "of 2 nodes"), ("127.0.0.2", 3, "of 3 nodes")):
        config = Config(ports=PortsConfig(host=host))
        assert said in cluster.warning_of_host(config, nodes)
        assert cluster.warning_of_host(config, 1) == ""
    assert cluster.warning_of_host(Config(ports=PortsConfig(host="10.0.0.7")), 2) == ""


def test_an_engine_across_nodes_is_led_from_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["run.dir=/shared/run", "generator.tensor_parallel=16"])
    first = ["--index", "0"]
    assert engine_command(config, 0, None) == ("generator-0", "generation.worker", first)
    assert engine_command(config, 0, EngineNode(1, 2)) == (
        "generator-0-node-1", "generation.follower", [*first, "--nodes", "2", "--node", "1"]
    )  # fmt: skip
    # The address of this node by which ports.host is reached.
    assert engine_command(config, 0, EngineNode(0, 2)) == (
        "generator-0", "generation.worker", [*first, "--nodes", "2", "--address", "127.0.0.1"]
    )  # fmt: skip


def test_torchrun_joins_the_trainers_nodes_at_the_first() -> None:
    config = load_config(None, ["parallel.tensor=8", "parallel.data=2", "generator.replicas=8"])
    config = config.model_copy(
        update={"ports": PortsConfig(host="10.0.0.7", torchrun=29500, sft=29600)}
    )
    nodes = place(config, nodes=3, gpus_per_node=8)
    assert torchrun_arguments(config, nodes[1], 1, "megatron_rl.trainer.train") == [
        "--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=run-address",
        "--rdzv-endpoint=10.0.0.7:29500", "--rdzv-conf=rank=1", "-m", "megatron_rl.trainer.train",
    ]  # fmt: skip
    # Another rendezvous, for a node that is done with the cold start before the others.
    assert torchrun_arguments(config, nodes[1], 1, "megatron_rl.trainer.sft")[3:] == [
        "--rdzv-endpoint=10.0.0.7:29600", "--rdzv-conf=rank=1", "-m", "megatron_rl.trainer.sft",
    ]  # fmt: skip
    assert nodes[2].trainer_ranks == 0 and len(nodes[2].engines) == 8
