"""The shape of a model, read from the config.json of its Hugging Face folder.

Used by trainer ranks and by tools; touches no tensor.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.divisibility import Counts, check_sizes
from megatron_rl.config.errors import InputError
from megatron_rl.config.hf_config import dense_count, text_values
from megatron_rl.config.tree import ParallelConfig
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Experts, Family
from megatron_rl.weights.layout.latent import latent_fields
from megatron_rl.weights.layout.rope import RopeScaling, read_rope, rope_scaling

SUPPORTED = tuple(FAMILIES)
_VOCAB_MULTIPLE = 128
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


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
    """Experts of each layer that has such; 0 is a dense MLP."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Units of one expert."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts add up to 1."""
    dense_layers: int = 0
    """First layers of a model with experts that have a dense MLP of `ffn` units instead."""
    shared_ffn: int = 0
    """Units of the experts that see every token, together."""
    is_router_corrected: bool = False
    """Whether scores are sigmoids, and an untrained vector corrects the choice of experts."""
    routed_scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    expert_groups: int = 1
    chosen_groups: int = 1
    """Groups of neighbouring experts, and those of them with a token's experts: the groups whose
    two best scores have the greatest sums."""
    rotary_dim: int = 0
    """First dimensions of a head, which are rotated, or last in latent attention; 0: all."""
    kv_rank: int = 0
    """Width of the latent that keys and values are made of; 0: ordinary attention."""
    q_rank: int = 0
    """The same of queries; 0: their projection has no low rank."""
    value_dim: int = 0
    """Of latent attention: dimensions of a head's values; `head_dim` is that of keys."""

    @property
    def nope_dim(self) -> int:
        """Of latent attention: first dimensions of a head, which are not rotated."""
        return self.head_dim - self.rotary_dim

    @property
    def latent_dim(self) -> int:
        """Of latent attention: width of what all heads share of a token, all that is cached."""
        return self.kv_rank + self.rotary_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of the model, counted from 0, is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def kinds(self, layers: Sequence[int]) -> list[tuple["ModelShape", int]]:
        """For each kind of layer among some of the model's: a model of it alone, and how many."""
        if not self.dense_layers:
            return [(self, len(layers))]
        dense = sum(layer < self.dense_layers for layer in layers)
        found = [
            (replace(self, dense_layers=0, experts=0, moe_ffn=0, shared_ffn=0), dense),
            (replace(self, dense_layers=0), len(layers) - dense),
        ]
        return [(kind, count) for kind, count in found if count]

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


def _shape(given: dict[str, Any], folder: Path) -> ModelShape:
    architecture = (given.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise InputError(
            f"{folder}: architecture {architecture} is not supported; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    family = FAMILIES[architecture]
    _check_text(given, family, folder)
    values = text_values(given)
    rope = read_rope(values, folder)
    values = {**family.defaults, **values}
    _refuse_unsupported(values, rope, family, folder)
    for key in _SIZES:
        if not isinstance(values[key], int):
            raise InputError(f"{folder / 'config.json'}: {key} is {values[key]!r}, not a number")
    heads = values["num_attention_heads"]
    shape = ModelShape(
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
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=rope_scaling(rope, values, folder),
        is_tied=values.get("tie_word_embeddings", False),
        has_qkv_bias=_switch(values, family.qkv_bias_key, family.has_qkv_bias),
        has_qk_norm=_switch(values, family.qk_norm_key, family.has_qk_norm),
        sliding_window=_sliding_window(values, family, folder),
        rotary_dim=_rotary_dim(values, rope, family),
        **_experts(values, family, folder),
    )
    if not family.is_latent:
        return shape
    return replace(shape, **latent_fields(values, shape.rope_scaling, folder))


def _switch(values: dict[str, Any], key: str, otherwise: bool) -> bool:
    return bool(values[key]) if key else otherwise


def _rotary_dim(values: dict[str, Any], rope: dict[str, Any], family: Family) -> int:
    """As `ModelShape.rotary_dim`; transformers takes the whole number below the share."""
    if not family.rotates_part:
        return 0
    share = rope.get("partial_rotary_factor", family.defaults["partial_rotary_factor"])
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return int(head_dim * share) if share != 1 else 0


def _check_text(given: dict[str, Any], family: Family, folder: Path) -> None:
    """Raise InputError unless the text model inside a wrapper is one that the table describes."""
    inner = given.get("text_config")
    if family.wrapper is None:
        if inner:
            raise InputError(
                f"{folder}: config.json keeps the model inside text_config, with other models, and "
                f"{family.architecture} has none: give the folder of the text model alone"
            )
        return
    if inner is not None and not isinstance(inner, dict):
        raise InputError(f"{folder / 'config.json'}: text_config is {inner!r:.80}, not a table")
    kind = (inner or given).get("model_type")
    if kind not in family.wrapper.text_types:
        raise InputError(
            f"{folder}: the text model inside {family.architecture} is {kind!r} "
            f"(text_config.model_type); supported: {', '.join(family.wrapper.text_types)}"
        )


def _refuse_unsupported(
    values: dict[str, Any], rope: dict[str, Any], family: Family, folder: Path
) -> None:
    """Raise InputError for settings that change the arithmetic and are not implemented."""
    if values.get("hidden_act", "silu") != "silu":
        raise InputError(f"{folder}: hidden_act {values['hidden_act']!r} is not supported: 'silu'")
    may_have_bias = family.has_qkv_bias or family.qkv_bias_key
    if values.get("mlp_bias") or (values.get("attention_bias") and not may_have_bias):
        raise InputError(f"{folder}: attention_bias and mlp_bias are not supported")
    if values.get("quantization_config"):
        raise InputError(
            f"{folder}: quantised weights (quantization_config) are not supported: give the model "
            "in bfloat16, float16 or float32; `megatron-rl convert FOLDER TARGET --to hf` "
            "dequantises FP8 in blocks, as DeepSeek-V3 is published"
        )
    if rope.get("partial_rotary_factor", 1) != 1 and not family.rotates_part:
        raise InputError(f"{folder}: partial_rotary_factor must be 1")
    # transformers applies Qwen's layer_types per layer; Mistral's window holds for all layers.
    if "full_attention" in (kinds := set(values.get("layer_types") or ())) and len(kinds) > 1:
        raise InputError(f"{folder}: layers of different attention (layer_types) are not supported")


def _experts(values: dict[str, Any], family: Family, folder: Path) -> dict[str, Any]:
    """The fields of ModelShape that describe experts; {} for a dense model."""
    experts = family.experts
    if experts is None:
        return {}
    steps = (values.get("decoder_sparse_step", 1), values.get("moe_layer_freq", 1))
    if steps != (1, 1) or values.get("mlp_only_layers"):
        raise InputError(
            f"{folder}: layers without experts among those with are not supported; "
            "decoder_sparse_step and moe_layer_freq must be 1, and mlp_only_layers empty"
        )
    has_shared = values.get("shared_expert_intermediate_size") or values.get("n_shared_experts")
    if has_shared and not experts.shared:
        raise InputError(f"{folder}: shared experts are not supported")
    # transformers 5 writes num_local_experts, earlier ones other keys, such as num_experts.
    keys = [key for key in experts.count_keys if key in values]
    count = values[keys[0] if keys else experts.count_keys[-1]]
    per_token = values["num_experts_per_tok"]
    is_normalised = experts.normalises
    if is_normalised is None:
        is_normalised = values["norm_topk_prob"]
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
        "moe_ffn": values[experts.units_key],
        "norm_topk_prob": is_normalised,
        **(_corrected(values, experts, is_normalised, folder) if experts.is_corrected else {}),
        **_groups(values, count, folder),
    }


def _corrected(
    values: dict[str, Any], experts: Experts, is_normalised: bool, folder: Path
) -> dict[str, Any]:
    """The fields that only a model with DeepSeek's router has."""
    if not is_normalised:
        raise InputError(
            f"{folder}: norm_topk_prob=false is not supported for a router of sigmoid scores: true"
        )
    dense = dense_count(values)
    if not 0 <= dense < values["num_hidden_layers"]:
        raise InputError(
            f"{folder}: first_k_dense_replace={dense} is not below the number of layers, "
            f"{values['num_hidden_layers']}: no layer would have experts"
        )
    return {
        "dense_layers": dense,
        "shared_ffn": values[experts.units_key] * (values["n_shared_experts"] or 0),
        "is_router_corrected": True,
        "routed_scale": float(values["routed_scaling_factor"]),
    }


def _groups(values: dict[str, Any], experts: int, folder: Path) -> dict[str, int]:
    """The fields of a router that chooses groups of experts first; {}: it chooses among all."""
    groups, chosen = values.get("n_group") or 1, values.get("topk_group") or 1
    if chosen >= groups:
        return {}
    per_token = values["num_experts_per_tok"]
    # Megatron 0.16.1 adds the best num_experts_per_tok // topk_group scores of a group.
    if per_token != 2 * chosen or experts % groups or experts < 2 * groups:
        raise InputError(
            f"{folder}: n_group={groups} of {experts} experts, topk_group={chosen}, "
            f"num_experts_per_tok={per_token} is not supported: groups must be equal, and "
            "num_experts_per_tok twice topk_group"
        )
    return {"expert_groups": groups, "chosen_groups": chosen}


def _sliding_window(values: dict[str, Any], family: Family, folder: Path) -> int | None:
    if family.has_window:
        return values.get("sliding_window")
    if values.get("use_sliding_window"):
        raise InputError(f"{folder}: use_sliding_window is not supported for {family.architecture}")
    return None


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
        ffn=0 if shape.experts and not shape.dense_layers else shape.ffn,
        experts=shape.experts,
        expert_ffn=shape.moe_ffn,
        shared_ffn=shape.shared_ffn,
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
