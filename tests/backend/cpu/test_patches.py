"""Each patch is needed by megatron-core 0.16.1, and together they are enough to train."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_rl.backend.cpu import patches
from megatron_rl.config.tree import OptimizerConfig, ParallelConfig
from megatron_rl.trainer.optimizer import build_optimizer, step_if_finite
from megatron_rl.weights.folders.load import unwrap
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_models import (
    LATENT,
    QWEN3_MOE,
    VOCAB,
    accumulate_gradients,
    load_on_rank,
    write_model,
)

ALONE, STAGES = ParallelConfig(), ParallelConfig(pipeline=2)
SHARED_EXPERTS = ParallelConfig(tensor=2, sequence=True, data=2, expert=2, expert_tensor=2)
FAILURES = {
    "current_device": (ALONE, r"device=torch.cuda.current_device\(\)"),
    "device_literals": (ALONE, "device='cuda'"),
    "move_to_device": (STAGES, r"weight.data.cuda\(\)"),
    "type_names": (ALONE, "clip_grads.py|must be one of torch.cuda.FloatTensor"),
    "synchronize": (STAGES, "p2p_communication.py"),
    "generator": (ALONE, "torch/cuda/random.py"),
    "router_product": (ALONE, "'te_general_gemm' is not defined"),
    "latents": (ALONE, "multi_latent_attention.py"),
    "token_dispatch": (ALONE, "torch.cuda.Stream"),
    "uneven_parts": (SHARED_EXPERTS, "mappings.py"),
    "gradient_products": (ALONE, "fused_weight_gradient_mlp_cuda module is not found"),
}
"""Patch -> how the train step that needs it is divided, what its traceback says."""
OF_EXPERTS = ("router_product", "token_dispatch", "uneven_parts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    write_model(path, is_tied=True)
    return path


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "mixture"
    write_model(path, family="Qwen3Moe", **QWEN3_MOE)
    return path


def train_step(folder: Path, parallel: ParallelConfig, leave_out: Sequence[str]) -> list[float]:
    """Losses before and after one optimizer step."""
    # install() skips what is marked as installed.
    patches._installed.update(leave_out)
    loaded = load_on_rank(folder, parallel)
    optimizer = build_optimizer(OptimizerConfig(), loaded.model)
    batch = [torch.arange(24)[None] * 7 % VOCAB]
    before = accumulate_gradients(loaded, batch, scale=1 / 23)
    step_if_finite(optimizer, lr=1e-2)
    after = accumulate_gradients(loaded, batch, scale=1 / 23)
    return [] if before is None or after is None else [before, after]


def random_state_is_set(leave_out: Sequence[str]) -> bool:
    """Whether Megatron's setter changes the state that the CPU draws from."""
    patches.install(leave_out)
    state = torch.Generator().manual_seed(99).get_state()
    patches.megatron_random._set_cuda_rng_state(state)
    return torch.equal(torch.get_rng_state(), state)


def embedding_backward(folder: Path, leave_out: Sequence[str]) -> str:
    """What computes the gradient of a model's embedding."""
    patches._installed.update(leave_out)
    loaded = load_on_rank(folder, ALONE)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    reduced = unwrap(loaded.model[0]).embedding.word_embeddings(ids).grad_fn
    return reduced.next_functions[0][0].name()


def devices_in_context() -> list[str]:
    """Where factories without a device of their own put tensors under `with torch.device`."""
    patches.install()
    with torch.device("meta"):
        made = [
            torch.empty(1),
            torch.tensor([1.0]),
            torch.zeros(1),
            torch.ones(1),
            torch.full((1,), 2),
        ]
    return [tensor.device.type for tensor in made]


def test_every_patch_is_tested() -> None:
    assert set(patches.PATCHES) == {*FAILURES, "set_generator", "embedding_gradient"}


@pytest.mark.parametrize("patch", FAILURES)
def test_train_step_fails_without(
    patch: str, folder: Path, mixture_folder: Path, tmp_path: Path
) -> None:
    parallel, message = FAILURES[patch]
    if patch in OF_EXPERTS:
        folder = mixture_folder
    if patch == "latents":
        folder = tmp_path
        write_model(folder, family="DeepseekV3", **LATENT)
    with pytest.raises(RanksFailed, match=message):
        run_ranks(train_step, parallel.world_size, folder, parallel, [patch])


def test_random_state_is_silently_kept_without_its_patch() -> None:
    assert run_ranks(random_state_is_set, 1, ["set_generator"]) == [False]
    assert run_ranks(random_state_is_set, 1, []) == [True]


def test_the_gradient_of_an_embedding_takes_the_vocabulary_without_its_patch(folder: Path) -> None:
    assert run_ranks(embedding_backward, 1, folder, []) == ["_EmbedBackward"]
    (name,) = run_ranks(embedding_backward, 1, folder, ["embedding_gradient"])
    assert name == "EmbeddingBackward0"


def test_a_device_context_works_beside_the_patches() -> None:
    assert run_ranks(devices_in_context, 1) == [["meta"] * 5]


@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(pipeline=2)])
def test_patches_are_enough_for_a_train_step(parallel: ParallelConfig, folder: Path) -> None:
    before, after = run_ranks(train_step, 2, folder, parallel, [])[-1]
    assert after < before - 0.1


def test_patches_are_enough_for_a_train_step_with_experts(mixture_folder: Path) -> None:
    parallel = SHARED_EXPERTS
    before, after = run_ranks(train_step, 4, mixture_folder, parallel, [])[-1]
    assert after < before - 0.1
