"""The shape of a model, read from the config.json of its Hugging Face folder.

Used by trainer ranks and by tools; touches no tensor.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.divisibility import Counts, check_sizes
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ParallelConfig
from megatron_rl.weights.layout.rope import read_rope

ROPE_TYPES = ("default", "linear", "llama3")
SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
_VOCAB_MULTIPLE = 128
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "norm_topk_prob": False},
}
"""Defaults of transformers 5 for keys missing in config.json that differ between families."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; the last three fields are used by llama3 only."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder-only transformer with RMSNorm and gated MLPs or experts."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    sliding_window: int | None
    experts: int = 0
    """Experts of each layer; 0 is a dense MLP."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Units of one expert."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts add up to 1."""

    def padded_vocab(self, tensor_ranks: int) -> int:
        """Vocabulary rows over all tensor ranks: a multiple of 128 per rank.

        Columns at or beyond `vocab` are padding: mask them to -inf before a softmax.
        """
        multiple = _VOCAB_MULTIPLE * tensor_ranks
        return math.ceil(self.vocab / multiple) * multiple


FOR_SIZES = "for `plan` and `simulate` one with config.json alone will do"


def read_shape(folder: Path) -> ModelShape:
    """Read `folder`/config.json. Raises InputError for a folder this trainer cannot train."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(
            f"model.path: no folder {folder}; give a Hugging Face model folder ({FOR_SIZES})"
        )
    if not path.is_file():
        raise InputError(
            f"model.path: {folder} has no config.json; give a Hugging Face folder ({FOR_SIZES})"
        )
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} is no JSON object: is it the configuration of a model?")
    return shape_of(values, folder)


def shape_of(values: dict[str, Any], folder: Path) -> ModelShape:
    """The shape in the values of a config.json; `folder` is for messages.

    Raises InputError for a model that this trainer cannot train.
    """
    try:
        return _shape(values, folder)
    except KeyError as error:
        raise InputError(f"{folder / 'config.json'} lacks the key {error}") from error


def _shape(values: dict[str, Any], folder: Path) -> ModelShape:
    architecture = (values.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise InputError(
            f"{folder}: architecture {architecture} is not supported; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    if values.get("text_config"):
        raise InputError(
            f"{folder}: config.json keeps the model inside text_config, with other models: give "
            "the folder of the text model alone"
        )
    rope = read_rope(values, folder)
    values = {**_DEFAULTS.get(architecture, {}), **values}
    _refuse_unsupported(values, architecture, folder)
    for key in _SIZES:
        if not isinstance(values[key], int):
            raise InputError(f"{folder / 'config.json'}: {key} is {values[key]!r}, not a number")
    heads = values["num_attention_heads"]
    theta, scaling = _rope(rope, folder)
    return ModelShape(
        architecture=architecture,
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        ffn=values["intermediate_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        norm_eps=values["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        is_tied=values.get("tie_word_embeddings", False),
        has_qkv_bias=architecture == "Qwen2ForCausalLM",
        has_qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        sliding_window=_sliding_window(values, architecture, folder),
        **_experts(values, architecture, folder),
    )


def _refuse_unsupported(values: dict[str, Any], architecture: str, folder: Path) -> None:
    """Raise InputError for settings that change the arithmetic and are not implemented."""
    if values.get("hidden_act", "silu") != "silu":
        raise InputError(f"{folder}: hidden_act {values['hidden_act']!r} is not supported: 'silu'")
    if values.get("mlp_bias") or (
        values.get("attention_bias") and architecture != "Qwen2ForCausalLM"
    ):
        raise InputError(f"{folder}: attention_bias and mlp_bias are not supported")
    if values.get("quantization_config"):
        raise InputError(
            f"{folder}: quantised weights (quantization_config) are not supported: give the model "
            "in bfloat16, float16 or float32"
        )
    if read_rope(values, folder).get("partial_rotary_factor", 1) != 1:
        raise InputError(f"{folder}: partial_rotary_factor must be 1")
    # transformers applies Qwen's layer_types per layer; Mistral's window holds for all layers.
    if "full_attention" in (kinds := set(values.get("layer_types") or ())) and len(kinds) > 1:
        raise InputError(f"{folder}: layers of different attention (layer_types) are not supported")


def _experts(values: dict[str, Any], architecture: str, folder: Path) -> dict[str, Any]:
    """The fields of ModelShape that describe experts; {} for a dense model."""
    if architecture not in _MIXTURES:
        return {}
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        raise InputError(
            f"{folder}: layers with and without experts are not supported; decoder_sparse_step "
            "must be 1 and mlp_only_layers empty"
        )
    if values.get("shared_expert_intermediate_size") or values.get("n_shared_experts"):
        raise InputError(f"{folder}: shared experts are not supported")
    is_mixtral = architecture == "MixtralForCausalLM"
    # transformers 5 writes num_local_experts for both families, earlier ones num_experts for Qwen.
    count = values["num_local_experts" if "num_local_experts" in values else "num_experts"]
    per_token = values["num_experts_per_tok"]
    is_normalised = is_mixtral or values["norm_topk_prob"]
    if not 1 <= per_token <= count:
        raise InputError(f"{folder}: num_experts_per_tok={per_token} of {count} experts")
    if per_token == 1 and is_normalised:
        raise InputError(
            f"{folder}: norm_topk_prob with num_experts_per_tok=1 is not supported: "
            "its router would get no gradient"
        )
    return {
        "experts": count,
        "experts_per_token": per_token,
        "moe_ffn": values["intermediate_size" if is_mixtral else "moe_intermediate_size"],
        "norm_topk_prob": is_normalised,
    }


def _sliding_window(values: dict[str, Any], architecture: str, folder: Path) -> int | None:
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return values.get("sliding_window")
    if values.get("use_sliding_window"):
        raise InputError(f"{folder}: use_sliding_window is not supported for {architecture}")
    return None


def _rope(rope: dict[str, Any], folder: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling from what `read_rope` returns."""
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise InputError(
            f"{folder}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, float(rope["factor"]))
    return theta, RopeScaling(
        kind,
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


_LEAST_COMMON_SHARE = 0.95
"""Least share of common token ids: models of one family share more."""


def check_parallel(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Raise InputError unless the parallel sizes divide the model."""
    check_sizes(parallel, counts_of(shape))


def counts_of(shape: ModelShape) -> Counts:
    """Counts of the model that ranks divide."""
    return Counts(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        layers=shape.layers,
        ffn=0 if shape.experts else shape.ffn,
        experts=shape.experts,
        expert_ffn=shape.moe_ffn,
    )


def check_teacher(teacher: ModelShape, policy: ModelShape, folder: Path, *, is_exact: bool) -> None:
    """Raise InputError unless the teacher's tokens can be compared with the policy's.

    Models of one family pad their vocabulary differently; ids that one of them lacks do not count.
    is_exact: whole distributions are compared.
    """
    sizes = f"{folder} has a vocabulary of {teacher.vocab}, and the policy one of {policy.vocab}"
    if is_exact and teacher.vocab != policy.vocab:
        raise InputError(
            f"algorithm.kl.estimator='exact' compares all tokens: {sizes}; take a teacher with as "
            "many, or placement='reward' with estimator='k1', which compares sampled tokens"
        )
    smaller, larger = sorted((teacher.vocab, policy.vocab))
    if smaller < larger * _LEAST_COMMON_SHARE:
        raise InputError(
            f"algorithm.reference.policy: {sizes}: take a reference with the policy's tokenizer"
        )
