"""The backend decides once, and says what a host cannot give."""

from pathlib import Path
from socket import gethostname

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_rl.backend.cpu.sglang import torch_is_for_cpu
from megatron_rl.backend.device import Backend, missing_for_determinism, select_backend
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ModelConfig, OptimizerConfig, ParallelConfig
from tests.distributed import run_ranks

needs_cpu_host = pytest.mark.skipif(torch.cuda.is_available(), reason="host has CUDA")


def decide(layers: str) -> tuple[str, str, str]:
    backend = select_backend(ModelConfig(layers=layers))
    return str(backend.device), backend.collectives, backend.layers


def refusal(model: ModelConfig, parallel: ParallelConfig) -> str:
    try:
        select_backend(model).init_distributed(parallel, seed=0, timeout_s=10)
    except InputError as error:
        return str(error)
    return ""


@needs_cpu_host
def test_host_without_cuda_gets_gloo_and_local_layers() -> None:
    assert run_ranks(decide, 1, "auto") == [("cpu", "gloo", "local")]


@needs_cpu_host
def test_gpus_for_which_cuda_does_not_start_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their host would train on its CPU cores without a word. Torch for the CPU does so."""
    given = {"CUDA_VISIBLE_DEVICES": "0,1"}
    if torch_is_for_cpu():
        assert run_ranks(decide, 1, "auto", env=given) == [("cpu", "gloo", "local")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    info = tmp_path / "torch-2.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((AssertionError, RuntimeError)) as failed:
        torch.cuda.init()
    with pytest.raises(InputError) as refused:
        select_backend(ModelConfig())
    assert str(refused.value).startswith(
        f"CUDA_VISIBLE_DEVICES=0,1 names GPUs, but CUDA does not start on {gethostname()}: "
        f"{failed.value}. Look at the driver"
    )


def test_determinism_needs_its_variables_on_cuda_and_switches_megatron() -> None:
    given = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    needed = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert missing_for_determinism("cuda", given) == needed
    assert missing_for_determinism("cuda", given | needed) == {}
    assert missing_for_determinism("cpu", {}) == {}
    for device, wanted in (("cuda", True), ("cuda", False), ("cpu", True)):
        backend = Backend(torch.device(device), "gloo", "local")
        found = backend.transformer_overrides(deterministic=wanted)["deterministic_mode"]
        assert found is (wanted and device == "cuda")


def torchs_switches() -> tuple[bool, bool]:
    select_backend(ModelConfig()).make_deterministic()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), fills


@needs_cpu_host
def test_deterministic_ranks_have_torch_refuse_other_kernels() -> None:
    assert run_ranks(torchs_switches, 1) == [(True, False)]


@needs_cpu_host
@pytest.mark.parametrize(
    "model", [ModelConfig(layers="transformer_engine"), ModelConfig(fp8="blockwise")]
)
def test_missing_engine_is_an_input_error(model: ModelConfig) -> None:
    assert "ransformer" in run_ranks(refusal, 1, model, ParallelConfig())[0]


@needs_cpu_host
def test_offload_of_optimizer_state_needs_a_device_to_leave() -> None:
    backend = Backend(torch.device("cpu"), "gloo", "local")
    backend.check_offload(OptimizerConfig())
    with pytest.raises(InputError, match="needs a CUDA device.*nearest possible: false"):
        backend.check_offload(OptimizerConfig(offload=True))


def replica(parallel: ParallelConfig) -> list[int]:
    backend = select_backend(ModelConfig())
    backend.init_distributed(parallel, seed=0, timeout_s=30)
    members = dist.get_process_group_ranks(backend.replica_group(parallel, 30))
    # Rank 0 holds the store through which the others still connect.
    dist.barrier()
    return members


@pytest.mark.parametrize(
    ("parallel", "replicas"),
    [
        (ParallelConfig(pipeline=2, data=2), [[0, 2], [1, 3]]),
        (ParallelConfig(context=2, data=2), [[0, 1], [2, 3]]),
        (ParallelConfig(context=2, pipeline=2), [[0, 1, 2, 3]]),
    ],
)
def test_a_replica_is_all_ranks_of_the_same_sequences(
    parallel: ParallelConfig, replicas: list[list[int]]
) -> None:
    for rank, members in enumerate(run_ranks(replica, 4, parallel)):
        assert rank in members and members in replicas


def timeouts_s(parallel: ParallelConfig) -> set[float]:
    """Of every group of this rank."""
    backend = select_backend(ModelConfig())
    backend.init_distributed(parallel, seed=0, timeout_s=77)
    backend.replica_group(parallel, 77)
    of_rank = distributed_c10d._world.pg_map
    assert len(of_rank) > 10
    cpu = torch.device("cpu")
    found = {group._get_backend(cpu).options._timeout.total_seconds() for group in of_rank}
    dist.barrier()
    return found


@needs_cpu_host
def test_every_group_has_the_timeout_of_the_run() -> None:
    parallel = ParallelConfig(tensor=2, context=2)
    assert run_ranks(timeouts_s, 4, parallel) == [{77.0}] * 4


def host_replica(parallel: ParallelConfig) -> tuple[str, bool]:
    select_backend(ModelConfig()).init_distributed(parallel, seed=0, timeout_s=30)
    group = Backend(torch.device("cpu"), "nccl", "local").replica_group(parallel, 30)
    dist.barrier()
    return dist.get_backend(group), group is parallel_state.get_model_parallel_group()


@needs_cpu_host
@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(context=2)])
def test_ranks_on_gpus_wait_for_batches_in_host_memory(parallel: ParallelConfig) -> None:
    assert run_ranks(host_replica, 2, parallel) == [("gloo", False)] * 2


@pytest.mark.parametrize(
    ("layers", "parallel", "has_window", "expected"),
    [
        ("local", ParallelConfig(context=2), True, "all_gather"),
        ("transformer_engine", ParallelConfig(context=2), False, "p2p"),
        ("transformer_engine", ParallelConfig(), True, "p2p"),
    ],
)
def test_context_ranks_exchange_as_the_layers_can(
    layers: str, parallel: ParallelConfig, has_window: bool, expected: str
) -> None:
    backend = Backend(torch.device("cpu"), "gloo", layers)
    assert backend.context_exchange(parallel, has_window=has_window) == expected


@pytest.mark.parametrize(
    ("layers", "parallel", "message"),
    [
        ("local", ParallelConfig(context_exchange="p2p"), "the local ones know 'all_gather'"),
        ("transformer_engine", ParallelConfig(context=2), "ring knows no sliding window"),
    ],
)
def test_an_exchange_that_the_layers_do_not_know_is_an_input_error(
    layers: str, parallel: ParallelConfig, message: str
) -> None:
    backend = Backend(torch.device("cpu"), "gloo", layers)
    with pytest.raises(InputError, match=message):
        backend.context_exchange(parallel, has_window=True)


def test_memory_that_engines_have_let_go_is_given_back_with_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    Backend(torch.device("cpu"), "gloo", "local").free_cache()
    assert asked == []
    Backend(torch.device("cuda", 0), "nccl", "local").free_cache()
    # First what was shared comes into the cache, then the cache goes back.
    assert asked == ["ipc_collect", "empty_cache"]


def test_wrong_count_of_ranks_is_an_input_error() -> None:
    text = run_ranks(refusal, 1, ModelConfig(), ParallelConfig(tensor=2, data=3))[0]
    assert "1 trainer ranks were started" in text and "needs 6" in text
