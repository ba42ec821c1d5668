"""Counts of parameters against transformers' models, without allocating them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.plan.parameters import model_parameters, stage_parameters
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import QWEN3_MOE, SIZES


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "vocab_size": 256}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 32}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Qwen3Moe", QWEN3_MOE),
    ],
)
def test_all_parameters_of_a_family_are_counted(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    config.architectures = [f"{family}ForCausalLM"]
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape = read_shape(tmp_path)
    assert model_parameters(shape) == sum(p.numel() for p in model.parameters())
    # Stages hold all of it, and one more table for a tied model; padding counts on each.
    tables = 2 * shape.padded_vocab(1) - (1 if shape.is_tied else 2) * shape.vocab
    for ends in ((0, 0), (0, 1)):
        parallel = ParallelConfig(pipeline=2, first_stage_layers=ends[0], last_stage_layers=ends[1])
        first, last = (stage_parameters(shape, parallel, stage).total for stage in (0, 1))
        assert first + last == model_parameters(shape) + tables * shape.hidden
    # Of four layers the first stage has three, the last one the head and its norm.
    one_layer = (first - last + shape.hidden) / 2
    assert first == shape.padded_vocab(1) * shape.hidden + 3 * one_layer
