"""Files whose projections lie one below the other, and published sizes of small families."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.plan.parameters import model_parameters, stage_parameters
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape, shape_of
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trainer_slices

PUBLISHED: dict[str, tuple[int, str, dict[str, Any]]] = {
    # Parameters of the published files, and the keys of config.json that are no defaults.
    "HuggingFaceTB/SmolLM3-3B": (3_075_098_624, "SmolLM3", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "max_position_embeddings": 65536,
        "rope_theta": 5e6}),
    "microsoft/phi-4": (14_659_507_200, "Phi3", {
        "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "max_position_embeddings": 16384, "rope_theta": 250000}),
    "microsoft/Phi-4-mini-instruct": (3_836_021_760, "Phi3", {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "tie_word_embeddings": True, "sliding_window": 262144, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}),
    "microsoft/Phi-3-mini-4k-instruct": (3_821_079_552, "Phi3", {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "sliding_window": 2047}),
}  # fmt: skip


def shape_named(name: str) -> ModelShape:
    _, family, values = PUBLISHED[name]
    return shape_of({"architectures": [f"{family}ForCausalLM"], **values}, Path(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str) -> None:
    count, family, values = PUBLISHED[name]
    config = getattr(transformers, f"{family}Config")(**values)
    with torch.device("meta"):
        theirs = getattr(transformers, f"{family}ForCausalLM")(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count
    shape = shape_named(name)
    assert model_parameters(shape) == count
    named = dict(theirs.named_parameters())
    assert hf_shapes(shape) == {key: tuple(tensor.shape) for key, tensor in named.items()}
    for ranks in (1, 2):
        place = Place(Share(0, ranks))
        held = sum(part.size for part in trainer_slices(shape, place))
        padding = (shape.padded_vocab(1) - shape.vocab) * shape.hidden * (1 + (not shape.is_tied))
        planned = stage_parameters(shape, ParallelConfig(tensor=ranks), 0).total
        assert planned == held + (ranks == 1) * padding


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_tensor_ranks_together_hold_each_row_of_a_fused_tensor_once(ranks: int) -> None:
    shape = shape_named("microsoft/phi-4")
    name = "model.layers.3.self_attn.qkv_proj.weight"
    rows: list[int] = []
    for rank in range(ranks):
        parts = [p for p in trainer_slices(shape, Place(Share(rank, ranks))) if p.hf == name]
        # Each key-value group: four queries, a key, a value of 128 rows.
        assert len(parts) == 3 * 10 // ranks
        for number in range(0, len(parts), 3):
            query, key, value = parts[number : number + 3]
            group = rank * 10 // ranks + number // 3
            assert (query.row, query.rows) == (group * 512, 512)
            assert (key.row, value.row) == (5120 + group * 128, 6400 + group * 128)
        rows += [row for part in parts for row in range(part.row, part.row + part.rows)]
    assert sorted(rows) == list(range(7680)) and math.prod(hf_shapes(shape)[name]) == 7680 * 5120
