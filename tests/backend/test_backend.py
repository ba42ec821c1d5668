"""The backend decides once, and says what a host cannot give."""

import pytest
import torch

from megatron_rl.backend import select_backend
from megatron_rl.protocol.config import ModelConfig, ParallelConfig
from megatron_rl.protocol.process import InputError
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
@pytest.mark.parametrize("model", [ModelConfig(layers="transformer_engine"), ModelConfig(fp8=True)])
def test_missing_engine_is_an_input_error(model: ModelConfig) -> None:
    assert "ransformer" in run_ranks(refusal, 1, model, ParallelConfig())[0]


def test_wrong_count_of_ranks_is_an_input_error() -> None:
    text = run_ranks(refusal, 1, ModelConfig(), ParallelConfig(tensor=2, data=3))[0]
    assert "1 trainer ranks were started" in text and "needs 6" in text
