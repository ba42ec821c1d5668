"""Every family computes transformers' logits, and takes transformers' defaults for absent keys."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ParallelConfig
from megatron_rl.weights.folders.hf_folder import write_config
from megatron_rl.weights.layout.shape import ModelShape, read_shape, shape_of
from tests.tiny_models import (
    GLM4_MOE,
    LATENT,
    MINISTRAL3,
    MIXED_WINDOWS,
    OLMO3,
    QWEN3_MOE,
    write_model,
)
from tests.trainer.model.test_build import assert_logits_equal
from tests.wrapped_models import RENAMED, WRAPPERS, respell, write_wrapped

ONE, TENSOR, PIPELINE = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2)
SEQUENCE = ParallelConfig(tensor=2, sequence=True)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    # As in Mistral-Small, the heads together are not as wide as the hidden state.
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {}),
    "smollm3-windows": ("SmolLM3", {**MIXED_WINDOWS, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "phi3-window-tied": ("Phi3", {"sliding_window": 16, "tie_word_embeddings": True}),
    "phi3-tied": ("Phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-tied": ("Mixtral", {"num_local_experts": 4, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-raw": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    "qwen3-moe-tied": ("Qwen3Moe", {**QWEN3_MOE, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": None}),
    "olmo3": ("Olmo3", OLMO3),
    "olmo3-plain": ("Olmo3", {**OLMO3, "rope_parameters": None}),
    "olmo3-no-window": ("Olmo3", {**OLMO3, "layer_types": ["full_attention"] * 4}),
    "ministral3": ("Ministral3", MINISTRAL3),
    "ministral3-tied": ("Ministral3", {**MINISTRAL3, "tie_word_embeddings": True}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-tied": (
        "Glm4Moe",
        {
            **GLM4_MOE,
            "tie_word_embeddings": True,
            "use_qk_norm": False,
            "attention_bias": False,
            "n_shared_experts": 1,
        },
    ),
    "glm4-moe-two-dense": (
        "Glm4Moe",
        {**GLM4_MOE, "first_k_dense_replace": 2, "partial_rotary_factor": 0.75},
    ),
    "glm4-moe-no-dense": ("Glm4Moe", {**GLM4_MOE, "first_k_dense_replace": 0}),
    "glm4-moe-groups": (
        "Glm4Moe",
        {**GLM4_MOE, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", LATENT),
    "glm4-moe-lite-tied": (
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "deepseek-moe": ("DeepseekV3", LATENT),
    "deepseek-moe-no-dense": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 0}),
    # As Moonlight.
    "deepseek-moe-raw-queries": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    ),
}


def splits_of(name: str) -> list[ParallelConfig]:
    """One process, two tensor ranks, two stages; experts need sequence parallelism."""
    if name.startswith(("olmo", "ministral")):
        return [ONE, TENSOR, SEQUENCE, PIPELINE]
    return [ONE, SEQUENCE if "mix" in name or "moe" in name else TENSOR, PIPELINE]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARNS: list[dict[str, Any]] = [
    {**YARN, "original_max_position_embeddings": 16},
    {**YARN, "original_max_position_embeddings": 12, "beta_fast": 8, "beta_slow": 0.5},
    {**YARN, "original_max_position_embeddings": 32, "truncate": False},
    {**YARN, "original_max_position_embeddings": 32, "attention_factor": 1.7},
    {**YARN, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5},
    # What is left out is the context length.
    {**YARN, "factor": 2.0},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rope", YARNS, ids=lambda rope: "-".join(rope))
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
def test_yarn_equals_transformers(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family=family, rope_parameters=rope)
    assert_logits_equal(tmp_path / "model", TENSOR, model)
    plain = write_model(tmp_path / "plain", family=family)
    ids = torch.arange(100)[None]
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-2)


LATENT_YARNS: list[dict[str, Any]] = [
    {**YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 0.707},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rope", LATENT_YARNS, ids=lambda rope: str(rope["mscale"]))
@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4MoeLite"])
def test_yarn_multiplies_scores_of_latent_attention(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    options = {**LATENT, "rope_parameters": rope}
    model = write_model(tmp_path / "model", family=family, **options)
    assert_logits_equal(tmp_path / "model", SEQUENCE, model)


WRAPPED = [
    (kind, is_other)
    for kind in WRAPPERS
    for is_other in (False, True)
    if not is_other or kind in RENAMED
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("kind", "is_other"), WRAPPED)
def test_a_text_model_inside_a_wrapper_equals_transformers(
    kind: str, is_other: bool, is_tied: bool, tmp_path: Path
) -> None:
    model = write_wrapped(tmp_path / "model", kind, is_tied=is_tied)
    if is_other:
        respell(tmp_path / "model", kind)
    for parallel in (SEQUENCE if kind.endswith("Moe") else TENSOR, PIPELINE):
        assert_logits_equal(tmp_path / "model", parallel, model)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, options = FAMILIES[name]
    model = write_model(tmp_path / "model", family=family, **options)
    for parallel in splits_of(name):
        assert_logits_equal(tmp_path / "model", parallel, model)


SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def shape_of_config(
    folder: Path, architecture: str, *, left_out: Sequence[str] = (), **values: Any
) -> ModelShape:
    """The shape that a config.json with no more than the needed keys means."""
    given = {"architectures": [f"{architecture}ForCausalLM"], **SIZES, **values}
    kept = {name: value for name, value in given.items() if name not in left_out}
    (folder / "config.json").write_text(json.dumps(kept))
    return read_shape(folder)


@pytest.mark.parametrize(
    "architecture",
    [
        "Llama",
        "Mistral",
        "Mixtral",
        "Qwen2",
        "Qwen3",
        "Qwen3Moe",
        "Glm4Moe",
        "SmolLM3",
        "Phi3",
        "Olmo2",
    ],
)
def test_absent_keys_mean_what_transformers_takes_for_them(
    architecture: str, tmp_path: Path
) -> None:
    shape = shape_of_config(tmp_path, architecture)
    theirs = getattr(transformers, f"{architecture}Config")(**SIZES)
    assert shape.kv_heads == theirs.num_key_value_heads
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or 128 // 64)
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
    assert shape.is_tied is theirs.tie_word_embeddings
    assert shape.sliding_window == getattr(theirs, "sliding_window", None)
    if architecture == "SmolLM3":
        shape = shape_of_config(tmp_path, architecture, num_hidden_layers=9)
        theirs = transformers.SmolLM3Config(**{**SIZES, "num_hidden_layers": 9})
        found = [int(layer not in shape.unrotated_layers) for layer in range(9)]
        assert found == theirs.no_rope_layers
    if architecture == "Qwen3Moe":
        assert shape.norm_topk_prob is theirs.norm_topk_prob is False
    if architecture == "Glm4Moe":
        assert shape.experts == theirs.n_routed_experts == 4
        assert shape.dense_layers == theirs.first_k_dense_replace == 1
        assert shape.shared_ffn == theirs.n_shared_experts * 24
        assert shape.routed_scale == theirs.routed_scaling_factor
        assert (shape.has_qkv_bias, shape.has_qk_norm) == (
            theirs.attention_bias,
            theirs.use_qk_norm,
        )
        share = theirs.rope_parameters["partial_rotary_factor"]
        assert shape.rotary_dim == share * shape.head_dim == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_group": 3}, "n_group=3 of 4 experts, topk_group=1, .*: groups must be equal"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false is not supported .*sigmoid"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace=2 is not below the number of layers"),
        ({"quantization_config": {"bits": 8}}, "quantised weights"),
        ({"num_local_experts": None}, "lacks the key 'num_local_experts'"),
    ],
)
def test_routers_that_megatron_does_not_have_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {name: value for name, value in values.items() if value is not None}
    left_out = [name for name in values if name not in given]
    with pytest.raises(InputError, match=message):
        shape_of_config(tmp_path, "Glm4Moe", left_out=left_out, **given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layers of different attention \(layer_types\) are not supported",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            r"two values of rope_theta: 10000.0 \(rope_parameters\) and 1000000.0 \(config.json\)",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 2.0}},
            r"two values of rope_type: 'default' \(rope_parameters\) and 'linear' \(rope_scaling\)",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4},
            },
            "two values of factor: 4 ",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "two kinds: 'llama3'"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "kind of layer"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not a table"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', not a number"),
        ({"text_config": {"rope_theta": 1e6}}, "inside text_config"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        shape_of_config(tmp_path, "Qwen3", **values)
    assert shape_of_config(tmp_path, "Qwen3", layer_types=["full_attention"] * 2).layers == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sliding_window": 8}, "sliding_window is not supported for Ministral3ForCausalLM"),
        (
            {"rope_parameters": None},
            "rope_type='default', .*beta=None and .* needs 'yarn'",
        ),
        ({"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}, "embeddings=None: Ministral"),
    ],
)
def test_queries_that_cannot_grow_are_refused(values: dict[str, Any], message: str) -> None:
    given = {"architectures": ["Ministral3ForCausalLM"], **SIZES, **MINISTRAL3, **values}
    with pytest.raises(InputError, match=message):
        shape_of(given, Path("m"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave=false is not supported"),
        ({"attention_bias": True}, "attention_bias and mlp_bias are not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
        ({"num_experts_per_tok": 3}, "n_group=4 of 8 experts, topk_group=2, num_experts_per_tok=3"),
        ({"n_group": 3}, "n_group=3 of 8 experts"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": YARN}, "yarn multiplies cosines by 1.139"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "dense layers must be the first ones"),
        (
            {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 0},
            "mlp_layer_types has 1 dense layers, but first_k_dense_replace=0",
        ),
    ],
)
@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4MoeLite"])
def test_latent_attention_that_megatron_does_not_compute_is_refused(
    family: str, values: dict[str, Any], message: str
) -> None:
    given = {
        "architectures": [f"{family}ForCausalLM"],
        **SIZES,
        **LATENT,
        "vocab_size": 9,
        **values,
    }
    with pytest.raises(InputError, match=message):
        shape_of(given, Path("m"))


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        # The same twice.
        {"rope_theta": 500000, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_both_spellings_of_rope_are_read_and_an_export_has_both(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    kind = next((kind for kind in ("llama3", "linear", "yarn") if kind in str(values)), None)
    shape = shape_of_config(tmp_path, family, **values)
    assert shape.rope_theta == 5e5 and (shape.rope_scaling and shape.rope_scaling.kind) == kind
    given = json.loads((tmp_path / "config.json").read_text())
    kind_of = getattr(transformers, f"{family}Config")
    theirs = kind_of.from_pretrained(tmp_path)
    write_config(given, tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())
    # Each spelling alone means the same to our reader, and both together to transformers.
    for other in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        alone = {key: value for key, value in written.items() if key not in other}
        assert shape_of(alone, tmp_path) == shape
    both = kind_of.from_pretrained(tmp_path)
    assert both.rope_parameters.items() >= {"rope_theta": 5e5}.items()
    assert both.rope_parameters["rope_type"] == theirs.rope_parameters["rope_type"]
