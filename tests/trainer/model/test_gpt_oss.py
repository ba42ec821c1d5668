"""gpt-oss: published sizes, what is refused, and what TransformerEngine's layers are asked for."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings import rope_utils

from megatron_rl.backend import device
from megatron_rl.backend.device import Backend
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig
from megatron_rl.plan.flops import causal_flops, causal_pairs
from megatron_rl.plan.generator import kv_bytes_per_token
from megatron_rl.plan.parameters import (
    active_parameters,
    model_parameters,
    stage_parameters,
)
from megatron_rl.trainer.model.build import transformer_config
from megatron_rl.weights.layout.local_names import local_name
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape, shape_of
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trainer_slices
from tests.tiny_models import GPT_OSS, write_model
from tests.trainer.model.test_build import assert_logits_equal

SIZES = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
}
PUBLISHED = {
    # Layers and experts; parameters of the published files, and those that a token uses (the model
    # card's 3.6 and 5.1 billion leave out the embedding).
    "openai/gpt-oss-20b": (24, 32, 20_914_757_184, 3.6e9),
    "openai/gpt-oss-120b": (36, 128, 116_829_156_672, 5.1e9),
}


def published(name: str, **values: Any) -> ModelShape:
    """The shape of a published model, whose config.json has the defaults for all other keys."""
    layers, experts, *_ = PUBLISHED[name]
    given = {"num_hidden_layers": layers, "num_local_experts": experts, **SIZES}
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    architecture = {"architectures": ["GptOssForCausalLM"], "layer_types": kinds}
    return shape_of({**architecture, **given, **values}, Path(name))


@pytest.mark.parametrize(
    "options", [GPT_OSS, {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 4}]
)
def test_logits_equal_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path, family="GptOss", **{**GPT_OSS, **options})
    for split in ({}, {"tensor": 2, "sequence": True, "expert": 2}, {"pipeline": 2}):
        assert_logits_equal(tmp_path, ParallelConfig(**split), model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str) -> None:
    layers, experts, count, active = PUBLISHED[name]
    shape = published(name)
    theirs = transformers.GptOssConfig(num_hidden_layers=layers, num_local_experts=experts, **SIZES)
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(theirs)
    assert sum(one.numel() for one in model.parameters()) == count
    assert sum(math.prod(size) for size in hf_shapes(shape).values()) == count
    assert model_parameters(shape) == count
    used = active_parameters(shape) - shape.vocab * shape.hidden
    assert used == pytest.approx(active, rel=0.02)
    for ranks in (1, 4):
        held = sum(part.size for part in trainer_slices(shape, Place(Share(0, ranks))))
        planned = stage_parameters(shape, ParallelConfig(tensor=ranks), 0).total
        padding = (shape.padded_vocab(1) - shape.vocab) * 2 * shape.hidden
        assert planned == held + (ranks == 1) * padding
        # Keys and values of every layer, those with a window too.
        assert kv_bytes_per_token(shape, ranks, 2) == layers * 2 * 8 // ranks * 64 * 2


def test_layers_with_a_window_cost_as_many_pairs_as_they_see() -> None:
    shape = published("openai/gpt-oss-20b")
    assert causal_pairs(1000, 128) == 128 * 129 // 2 + 872 * 128
    pairs = 12 * (causal_pairs(1000, 128) + 1000 * 1001 // 2)
    assert causal_flops(shape, 1000) == 2 * 64 * (64 + 64) * pairs


def test_absent_keys_mean_what_transformers_takes_for_them() -> None:
    shape, theirs = published("openai/gpt-oss-120b"), transformers.GptOssConfig()
    assert (shape.kv_heads, shape.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (shape.experts, shape.experts_per_token) == (128, theirs.num_experts_per_tok)
    assert (shape.glu_limit, shape.sliding_window) == (theirs.swiglu_limit, theirs.sliding_window)
    assert shape.full_layers == tuple(
        layer for layer, kind in enumerate(theirs.layer_types) if kind == "full_attention"
    )
    assert (shape.norm_eps, shape.max_positions) == (
        theirs.rms_norm_eps,
        theirs.max_position_embeddings,
    )
    rope, scaling = theirs.rope_parameters, shape.rope_scaling
    assert scaling is not None and shape.rope_theta == rope["rope_theta"] == 150000
    assert (scaling.kind, scaling.factor, scaling.original_positions, scaling.is_truncated) == (
        rope["rope_type"],
        rope["factor"],
        rope["original_max_position_embeddings"],
        rope["truncate"],
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_bias": False}, "attention_bias=false is not supported"),
        ({"swiglu_alpha": 2.0}, "swiglu_alpha=2.0 is not supported: 1.702"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"layer_types": None}, "layer_types=None is not supported"),
    ],
)
def test_other_arithmetic_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        published("openai/gpt-oss-20b", **values)


def test_ranks_cannot_share_experts_with_biases() -> None:
    shape = published("openai/gpt-oss-20b")
    check_parallel(shape, ParallelConfig(tensor=2, expert=2, sequence=True))
    with pytest.raises(InputError, match="expert_tensor = 2: .* biases.*; nearest possible: 1"):
        check_parallel(shape, ParallelConfig(tensor=2, expert_tensor=2, sequence=True))


def test_transformer_engines_layers_are_asked_for_sinks_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, family="GptOss", **GPT_OSS)
    backend = Backend(torch.device("cpu"), "gloo", "transformer_engine")
    monkeypatch.setattr(device, "is_te_min_version", lambda version: True)
    # Stands for TransformerEngine's, which Megatron looks for and nobody calls here.
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", len)

    def config_of(**parallel: int) -> Any:
        given = ParallelConfig(**parallel)
        cfg = Config(model=ModelConfig(path=tmp_path, dtype="float32"), parallel=given)
        return transformer_config(backend, cfg, read_shape(tmp_path))

    config = config_of()
    assert config.softmax_type == "learnable" and config.add_bias_linear
    assert config.window_size == (11, 0) and config.window_attn_skip_freq == [1, 0, 1, 0]
    assert config.activation_func is quick_gelu and config.bias_activation_fusion
    assert (config.activation_func_clamp_value, config.glu_linear_offset) == (1.5, 1.0)
    with pytest.raises(InputError, match="parallel.context = 2: .* sinks .*nearest possible: 1"):
        config_of(context=2)
    monkeypatch.setattr(device, "is_te_min_version", lambda version: version != "2.12")
    with pytest.raises(InputError, match="TransformerEngine before 2.12 computes no attention"):
        config_of()


def test_biases_of_grouped_experts_have_our_names() -> None:
    prefix = "decoder.layers.3.mlp.experts."
    assert local_name(f"module.{prefix}linear_fc1.bias11") == (
        f"{prefix}local_experts.11.linear_fc1.bias"
    )
    assert local_name(f"{prefix}linear_fc2.weight0") == (
        f"{prefix}local_experts.0.linear_fc2.weight"
    )
