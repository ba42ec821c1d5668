"""Longrope in short sequences, and factors of cosines where only part of a head is rotated."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.launcher.model_checks import check_model
from megatron_rl.weights.folders.hf_folder import write_config
from megatron_rl.weights.layout.shape import read_shape, shape_of
from tests.tiny_models import GLM4_MOE, write_model
from tests.trainer.model.test_build import assert_logits_equal
from tests.trainer.model.test_families import PIPELINE, SEQUENCE, SIZES, TENSOR, YARN
from tests.weights.made_up import write_zeros

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.3, 3.1],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
"""Of a head of 16 dimensions, as Phi-4-mini; 64 of 128 positions are the original ones."""
WHOLE = {**LONGROPE, "partial_rotary_factor": 1.0, "short_factor": [1 + n / 3 for n in range(8)],
         "long_factor": [4.0] * 8}  # fmt: skip
ORIGINAL = {"original_max_position_embeddings": 64}


PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize("rope", [LONGROPE, WHOLE, {**LONGROPE, "attention_factor": 1.4}, PARTIAL])
def test_rotary_embeddings_of_phi_equal_those_of_transformers(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m", family="Phi3", rope_parameters=dict(rope), **ORIGINAL)
    for parallel in (TENSOR, PIPELINE):
        assert_logits_equal(tmp_path / "m", parallel, model)
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    other = write_model(tmp_path / "plain", family="Phi3", rope_parameters=plain)
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-2)


def test_yarn_multiplies_the_rotated_part_of_a_head_alone(tmp_path: Path) -> None:
    rope = {**YARN, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}
    model = write_model(tmp_path, family="Glm4Moe", rope_parameters=rope, **GLM4_MOE)
    assert_logits_equal(tmp_path, SEQUENCE, model)


PUBLISHED: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "vocab_size": 200064, "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e4,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True, "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}  # fmt: skip
"""Phi-4-mini-instruct, but for the values of its long factors."""


def test_phi_4_mini_is_read_as_transformers_does(tmp_path: Path) -> None:
    shape = shape_of(PUBLISHED, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = transformers.Phi3Config.from_pretrained(tmp_path)
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    assert shape.rotary_dim == 96 == 2 * len(rotary.inv_freq) and shape.is_tied
    assert shape.rope_scaling.attention_factor == rotary.attention_scaling > 1.1
    older = {**PUBLISHED, "rope_scaling": {**PUBLISHED["rope_scaling"], "type": "su"}}
    assert shape_of(older, tmp_path) == shape


def test_an_export_in_both_spellings_keeps_the_rotated_part(tmp_path: Path) -> None:
    write_model(tmp_path, family="Phi3", rope_parameters=dict(LONGROPE), **ORIGINAL)
    values, theirs = (json.loads((tmp_path / "config.json").read_text()) for _ in range(2))
    assert "partial_rotary_factor" not in values
    write_config(values, tmp_path, torch.float32)
    found = transformers.Phi3Config.from_pretrained(tmp_path).rope_parameters
    assert found.items() >= theirs["rope_parameters"].items()


def test_sequences_beyond_the_original_positions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    write_zeros(tmp_path)
    config = Config(model=ModelConfig(path=tmp_path))

    def check(tokens: int) -> None:
        generator = config.generator.model_copy(update={"context_tokens": tokens})
        check_model(config.model_copy(update={"generator": generator}))

    check(4096)
    with pytest.raises(InputError, match="context_tokens = 4097, .* at most 4096"):
        check(4097)
    for family, kind in (("Phi3", "yarn"), ("Llama", "longrope")):
        named = {"architectures": [f"{family}ForCausalLM"], "rope_scaling": {"type": kind}}
        with pytest.raises(InputError, match=f"rope type '{kind}' is not supported"):
            shape_of({**SIZES, **named}, tmp_path)


ON_GPU_HOST = """
import sys
from pathlib import Path
from megatron_rl.rehearsal import engine_stand_in
engine_stand_in.install()
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as factor_of)
from megatron_rl.backend.device import Backend
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.trainer.model.build import transformer_config
from megatron_rl.weights.layout.shape import read_shape
backend = Backend(torch.device("cpu"), "gloo", "transformer_engine")
cfg = Config(model=ModelConfig(path=Path(sys.argv[1])))
config = transformer_config(backend, cfg, read_shape(cfg.model.path))
print(config.apply_rope_fusion, factor_of(config))
"""


@pytest.mark.parametrize("rope", [LONGROPE, WHOLE])
def test_transformer_engines_fused_rotation_is_not_asked_for_a_factor(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, family="Phi3", rope_parameters=dict(rope), **ORIGINAL)
    factor = read_shape(tmp_path).rope_scaling.attention_factor
    command = [sys.executable, "-c", ON_GPU_HOST, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    is_fused, found = told.stdout.split()
    is_partial = rope is LONGROPE
    assert is_fused == str(not is_partial)
    assert float(found) == pytest.approx(factor if is_partial else 1.0) and factor > 1.05
