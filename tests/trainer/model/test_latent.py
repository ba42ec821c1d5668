"""Latent attention of TransformerEngine's layers, as far as a host without them can tell."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_rl.backend import device
from megatron_rl.backend.device import Backend, engine_spec
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.trainer.model.build import transformer_config
from megatron_rl.weights.layout.local_names import local_name
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import LATENT, write_model

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16,
        "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}  # fmt: skip


@pytest.mark.parametrize("dense", [0, 1])
def test_transformer_engines_layers_are_asked_for_latent_attention(
    dense: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**LATENT, "first_k_dense_replace": dense, "rope_parameters": YARN}
    write_model(tmp_path, family="DeepseekV3", **options)
    backend = Backend(torch.device("cpu"), "gloo", "transformer_engine")
    cfg = Config(model=ModelConfig(path=tmp_path, dtype="float32"))
    config = transformer_config(backend, cfg, read_shape(tmp_path))
    assert isinstance(config, MLATransformerConfig)
    # Megatron's fused rotation takes the angles of its own embedding, which are not ours.
    assert not config.apply_rope_fusion and config.rope_type == "rope"
    factor = 0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor) + 1
    assert factor == pytest.approx(0.1 * math.log(40) + 1)
    given: list[Any] = []
    monkeypatch.setattr(
        device,
        "get_gpt_layer_with_transformer_engine_spec",
        lambda **options: given.append(options),
    )
    monkeypatch.setattr(
        device, "get_gpt_decoder_block_spec", lambda config, **options: given.append(vars(config))
    )
    engine_spec(config, 0)
    assert given[0]["multi_latent_attention"] and given[0]["qk_layernorm"]


def test_norms_that_transformer_engine_fuses_have_our_names() -> None:
    prefix = "decoder.layers.0.self_attention."
    for part, projection in (("q", "linear_q_up_proj"), ("kv", "linear_kv_up_proj")):
        name = f"module.{prefix}{projection}.layer_norm_weight"
        assert local_name(name) == f"{prefix}{part}_layernorm.weight"
