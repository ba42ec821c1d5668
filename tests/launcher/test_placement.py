"""Which node runs what: worked out by hand, and never two roles on one GPU."""

import itertools

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.tree import Config, GeneratorConfig, ParallelConfig, WeightsConfig
from megatron_rl.launcher.placement import (
    EngineNode,
    NodeRoles,
    gpu_environment,
    listed_gpus,
    place,
)


def config(ranks: int, replicas: int, width: int, *, colocate: bool = False) -> Config:
    return Config(
        parallel=ParallelConfig(data=ranks),
        generator=GeneratorConfig(replicas=replicas, tensor_parallel=width, colocate=colocate),
        weights=WeightsConfig(method="folder" if colocate else "reshard"),
    )


def test_one_node_of_trainer_and_engines() -> None:
    [roles] = place(config(4, 2, 2), nodes=1, gpus_per_node=8)
    assert roles == NodeRoles(4, 1, {0: range(4, 6), 1: range(6, 8)})


def test_engines_follow_the_trainers_nodes() -> None:
    nodes = place(config(16, 8, 2), nodes=4, gpus_per_node=8)
    assert [node.trainer_ranks for node in nodes] == [8, 8, 0, 0]
    assert {node.trainer_nodes for node in nodes} == {2}
    assert nodes[3].engines == {
        index: range(2 * i, 2 * i + 2) for i, index in enumerate(range(4, 8))
    }


def test_an_engine_never_lies_across_two_nodes() -> None:
    first, second = place(config(2, 3, 3), nodes=2, gpus_per_node=8)
    assert first.engines == {0: range(2, 5), 1: range(5, 8)} and second.engines == {2: range(3)}
    first, second = place(config(4, 2, 3), nodes=2, gpus_per_node=8)
    assert first.engines == {0: range(4, 7)} and second.engines == {1: range(3)}


def test_an_engine_with_more_ranks_than_a_node_has_gpus_takes_whole_nodes() -> None:
    nodes = place(config(4, 2, 16), nodes=5, gpus_per_node=8)
    assert nodes[0] == NodeRoles(4, 1)
    for number, (index, rank) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)], start=1):
        assert nodes[number].engines == {index: range(8)}
        assert nodes[number].engine_nodes == {index: EngineNode(rank, 2)}
    # An engine that fits a node has no parts elsewhere.
    assert all(not node.engine_nodes for node in place(config(8, 2, 8), nodes=3, gpus_per_node=8))
    other = config(8, 1, 16)
    other = other.model_copy(
        update={"generator": other.generator.model_copy(update={"engine": "site.module:Engine"})}
    )
    shared = config(8, 1, 16).model_copy(update={"weights": WeightsConfig(method="ipc")})
    with pytest.raises(InputError, match="weights.method='ipc' shares memory of one node"):
        place(shared, nodes=3, gpus_per_node=8)
    with pytest.raises(InputError, match="only SGLang's engines lie across nodes, not 'site"):
        place(other, nodes=3, gpus_per_node=8)


def test_engines_on_the_trainers_gpus_only_where_that_is_wanted() -> None:
    [roles] = place(config(1, 1, 1, colocate=True), nodes=1, gpus_per_node=1)
    assert roles == NodeRoles(1, 1, {0: range(1)})
    for ranks, replicas, width in itertools.product((1, 2, 8), (1, 3), (1, 2, 4)):
        nodes = place(config(ranks, replicas, width), nodes=4, gpus_per_node=8)
        used = [(number, gpu) for number, node in enumerate(nodes)
                for gpus in (range(node.trainer_ranks), *node.engines.values())
                for gpu in gpus]  # fmt: skip
        assert len(used) == len(set(used)) == ranks + replicas * width
        assert sum(len(node.engines) for node in nodes) == replicas


@pytest.mark.parametrize(
    ("ranks", "replicas", "width", "message"),
    [
        (12, 1, 1, "12 trainer ranks do not fill whole nodes of 8 GPUs"),
        (8, 1, 12, "= 12 is more than the 8 GPUs of a node, and no .* nearest possible: 8"),
        (8, 1, 16, "8 trainer ranks and 1 engines of 16 GPUs need 3 nodes of 8 GPUs"),
        (8, 9, 1, "8 trainer ranks and 9 engines of 1 GPUs need 3 nodes of 8 GPUs"),
    ],
)
def test_what_does_not_fit_is_refused(ranks: int, replicas: int, width: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        place(config(ranks, replicas, width), nodes=2, gpus_per_node=8)


@pytest.mark.parametrize(("tensor", "gpus", "fits"), [(4, 4, True), (8, 8, True), (8, 4, False)])
def test_overlapped_tensor_ranks_are_of_one_node(tensor: int, gpus: int, fits: bool) -> None:
    overrides = [f"parallel.tensor={tensor}", "parallel.data=2", "parallel.sequence=true"]
    plain = load_config(None, overrides)
    padded = ["expert.train.pad_microbatches=true", "expert.parallel.overlap_tensor=true"]
    place(plain, nodes=5, gpus_per_node=gpus)
    overlapped = load_config(None, [*overrides, *padded])
    if fits:
        place(overlapped, nodes=5, gpus_per_node=gpus)
        return
    with pytest.raises(InputError, match="tensor=8 on nodes of 4 GPUs: tensor ranks of different"):
        place(overlapped, nodes=5, gpus_per_node=gpus)


@pytest.mark.parametrize(
    ("ranks", "method", "is_possible"),
    [(1, "ipc", True), (2, "ipc", False), (1, "folder", True), (2, "folder", True),
     (1, "reshard", False)],
)  # fmt: skip
def test_shared_gpus_need_a_method_that_works_there(
    ranks: int, method: str, is_possible: bool
) -> None:
    overrides = [
        f"parallel.data={ranks}", f"weights.method={method}", "generator.colocate=true",
    ]  # fmt: skip
    if is_possible:
        load_config(None, overrides)
    else:
        with pytest.raises(ConfigError, match="two ranks of NCCL do not share a GPU"):
            load_config(None, overrides)


@pytest.mark.usefixtures("torch_for_gpus")
def test_a_role_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,GPU-5a,7")
    names = listed_gpus()
    assert gpu_environment(range(1, 3), names) == {"CUDA_VISIBLE_DEVICES": "3,GPU-5a"}
    for none in ("", "-1", "NoDevFiles", "none", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert listed_gpus() == [] and gpu_environment(range(1), []) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1,-1,2")
    assert listed_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=0,0 names a GPU twice"):
        listed_gpus()


def test_an_evaluation_alone_has_all_gpus() -> None:
    sections = {"parallel": {"data": 4}, "generator": {"tensor_parallel": 2, "replicas": 2}}
    config = Config.model_validate({**sections, "train": {"steps": 0}})
    [roles] = place(config, nodes=1, gpus_per_node=4)
    assert (roles.trainer_ranks, roles.engines) == (0, {0: range(2), 1: range(2, 4)})
