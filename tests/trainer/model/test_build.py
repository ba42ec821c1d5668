"""The model computes transformers' logits under every split, and sums gradients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.config.tree import ParallelConfig
from megatron_rl.plan.parameters import model_parameters
from megatron_rl.weights.layout.local_names import named_parameters
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import run_ranks
from tests.tiny_models import (
    CORRECTION,
    GLM4_MOE,
    LATENT,
    QWEN3_MOE,
    VOCAB,
    accumulate_gradients,
    full_logits,
    load_on_rank,
    write_model,
)

LENGTHS = [20, 7, 21]
SPLITS = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    ParallelConfig(tensor=2, sequence=True),
    ParallelConfig(pipeline=2),
]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def padded_and_packed(folder: Path, parallel: ParallelConfig, ids: Tensor) -> list[Tensor] | None:
    """Logits of the batch, and of the sequences cut to LENGTHS and packed."""
    loaded = load_on_rank(folder, parallel)
    flat = torch.cat([row[:length] for row, length in zip(ids, LENGTHS, strict=True)])[None]
    padded, packed = full_logits(loaded, ids), full_logits(loaded, flat, LENGTHS)
    return None if padded is None or packed is None else [padded, packed]


def assert_logits_equal(folder: Path, parallel: ParallelConfig, model: torch.nn.Module) -> None:
    ids = torch.randint(0, VOCAB, (3, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits
    padded, packed = run_ranks(padded_and_packed, parallel.world_size, folder, parallel, ids)[-1]
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-5)
    cut = torch.cat([row[:length] for row, length in zip(expected, LENGTHS, strict=True)])
    torch.testing.assert_close(packed, cut[None], rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_llama_logits_equal_those_of_transformers(is_tied: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama", is_tied=is_tied)
    for parallel in SPLITS:
        assert_logits_equal(tmp_path / "llama", parallel, model)


@pytest.mark.parametrize("scaling", [LLAMA3, LINEAR])
def test_stretched_frequencies_equal_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", rope_parameters=scaling)
    assert_logits_equal(tmp_path / "model", ParallelConfig(tensor=2), model)


MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Glm4Moe", GLM4_MOE),
    ("DeepseekV3", LATENT),
]
MIXTURE_SPLITS = [
    ParallelConfig(),
    ParallelConfig(tensor=2, sequence=True),
    ParallelConfig(pipeline=2),
    ParallelConfig(data=2, expert=2),
    ParallelConfig(tensor=2, sequence=True, expert=2),
    ParallelConfig(tensor=2, sequence=True, data=2, expert=4),
]


@pytest.mark.parametrize(("family", "options"), MIXTURES)
def test_mixtures_of_experts_equal_transformers(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "moe", family=family, **options)
    for parallel in MIXTURE_SPLITS if family != "Mixtral" else MIXTURE_SPLITS[-1:]:
        assert_logits_equal(tmp_path / "moe", parallel, model)


def test_parameters_are_counted_without_padding(tmp_path: Path) -> None:
    families = [("Llama", True), ("Qwen2", False), ("Qwen3Moe", False), ("Glm4Moe", False)]
    families += [("DeepseekV3", False), ("Glm4MoeLite", True), ("Olmo2", False)]
    families += [("SmolLM3", True), ("Phi3", False)]
    for number, (family, is_tied) in enumerate(families):
        given = {"Qwen3Moe": QWEN3_MOE, "Glm4Moe": GLM4_MOE, "DeepseekV3": LATENT}
        given["Glm4MoeLite"] = {**LATENT, "q_lora_rank": None}
        options = given.get(family, {})
        model = write_model(tmp_path / str(number), family=family, is_tied=is_tied, **options)
        expected = sum(parameter.numel() for parameter in model.parameters())
        # Corrections of routers are buffers.
        expected += sum(
            buffer.numel() for name, buffer in model.named_buffers() if name.endswith(CORRECTION)
        )
        assert model_parameters(read_shape(tmp_path / str(number))) == expected


def gradients(
    folder: Path, parallel: ParallelConfig, shares: Sequence[Sequence[Tensor]], recompute: str
) -> dict[str, Tensor]:
    """main_grad by name after this data-parallel rank's share of the batches."""
    loaded = load_on_rank(folder, parallel, recompute=recompute)
    rank = torch.distributed.get_rank() if parallel.data > 1 else 0
    accumulate_gradients(loaded, shares[rank], scale=1 / 100)
    named = named_parameters(loaded.model)
    return {name: parameter.main_grad.clone() for name, parameter in named.items()}


def test_gradient_is_a_sum_over_microbatches_and_data_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    model = write_model(folder)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCAB, (1, n), generator=generator) for n in (9, 30, 12, 17)]
    [alone] = run_ranks(gradients, 1, folder, ParallelConfig(), [batches], "none")
    [recomputed] = run_ranks(gradients, 1, folder, ParallelConfig(), [batches], "full")
    # The ranks get different counts of tokens: an average over ranks or tokens would show.
    shares = [batches[:2], batches[2:]]
    halves = run_ranks(gradients, 2, folder, ParallelConfig(data=2), shares, "none")
    for name, expected in alone.items():
        for found in (recomputed, *halves):
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)

    for ids in batches:
        logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        (loss / 100).backward()
    torch.testing.assert_close(
        alone["decoder.final_layernorm.weight"], model.model.norm.weight.grad, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        alone["embedding.word_embeddings.weight"][:VOCAB],
        model.model.embed_tokens.weight.grad,
        rtol=1e-4,
        atol=1e-6,
    )


def overlaps(folder: Path, parallel: ParallelConfig) -> tuple[bool, bool, bool]:
    """Whether gradients and parameters travel behind passes, gradients behind the last alone."""
    [chunk] = load_on_rank(folder, parallel).model
    told = chunk.ddp_config
    return told.overlap_grad_reduce, told.overlap_param_gather, bool(chunk.config.no_sync_func)


@pytest.mark.parametrize(("gradients", "parameters"), [(False, False), (True, False), (True, True)])
def test_collectives_hide_behind_the_passes_where_they_shall(
    tmp_path: Path, gradients: bool, parameters: bool
) -> None:
    """The steps are the same either way, so that results do not show it."""
    write_model(tmp_path, num_hidden_layers=1)
    parallel = ParallelConfig(
        data=2,
        distributed_optimizer=True,
        overlap_gradients=gradients,
        overlap_parameters=parameters,
    )
    found = run_ranks(overlaps, 2, tmp_path, parallel)
    assert found == [(gradients, parameters, gradients)] * 2
