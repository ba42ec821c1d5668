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
from megatron_rl.config.hf_config import text_values
from megatron_rl.config.layer_choice import Attention
from megatron_rl.config.tree import ParallelConfig, TrainConfig
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Family
from megatron_rl.weights.layout.latent import latent_fields
from megatron_rl.weights.layout.layer_kinds import unrotated_layers, window_fields
from megatron_rl.weights.layout.mixture import mixture_fields
from megatron_rl.weights.layout.rope import RopeScaling, read_rope, rope_scaling, scaled_queries

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
    has_biases: bool = False
    """Whether the output of attention, routers and experts have biases; queries, keys and values
    then have too."""
    has_sinks: bool = False
    """Whether a trained number of each head stands in the denominator of its softmax."""
    glu_limit: float = 0.0
    """Of experts that compute (up + 1) * gate * sigmoid(1.702 * gate): the largest gate and the
    largest magnitude of up. 0: they compute up * silu(gate)."""
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
    norms_all_heads: bool = False
    norms_behind: bool = False
    """As in the family's table."""
    stretches_full_layers: bool = False
    """Whether `rope_scaling` applies only to layers without a window."""
    value_dim: int = 0
    """Of latent attention: dimensions of a head's values; `head_dim` is that of keys."""
    full_layers: tuple[int, ...] = ()
    """Layers, counted from 0, for which `sliding_window` does not hold."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers, counted from 0, without rotary embeddings."""
    has_fused_files: bool = False
    """Whether files have projections one below the other; see `fused_files.py`."""

    def window_of(self, layer: int) -> int | None:
        """Most tokens that a token of the layer sees, itself included; None: all before it."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def normed_heads(self) -> tuple[int, int]:
        """Heads that a norm of queries, and one of keys, is over."""
        return (self.heads, self.kv_heads) if self.norms_all_heads else (1, 1)

    @property
    def jointly_normed(self) -> int:
        """Key-value heads that are normed together; 0: each is by itself."""
        return self.kv_heads if self.norms_all_heads else 0

    @property
    def scales_queries(self) -> bool:
        """Whether queries grow with their position: see `RopeScaling.query_beta`."""
        return self.rope_scaling is not None and self.rope_scaling.query_beta != 0

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head that rotary embeddings turn."""
        return self.rotary_dim or self.head_dim

    @property
    def nope_dim(self) -> int:
        """Of latent attention: first dimensions of a head, which are not rotated."""
        return self.head_dim - self.rotary_dim

    @property
    def latent_dim(self) -> int:
        """Of latent attention: width of what all heads share of a token, all that is cached."""
        return self.kv_rank + self.rotary_dim

    def attention(self, train: TrainConfig) -> Attention:
        """What decides which kernels compute the model's attention."""
        return Attention(
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            has_window=self.sliding_window is not None,
            has_sinks=self.has_sinks,
            is_deterministic=train.deterministic,
        )

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
    return shape_of(read_values(path), folder)


def read_values(path: Path) -> dict[str, Any]:
    """The values in a model folder's JSON file. Raises InputError."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} is no object of keys and values: is it of a model?")
    return values


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
    _check_text(given, FAMILIES[architecture], folder)
    family = FAMILIES[architecture].of_text(given)
    values = text_values(given)
    rope = read_rope(values, folder)
    values = {**family.defaults, **values}
    _refuse_unsupported(values, rope, family, folder)
    for key in _SIZES:
        if not isinstance(values[key], int):
            raise InputError(f"{folder / 'config.json'}: {key} is {values[key]!r}, not a number")
    heads = values["num_attention_heads"]
    scaling = rope_scaling(rope, values, folder)
    if family.scales_queries:
        scaling = scaled_queries(scaling, rope, folder)
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
        rope_scaling=scaling,
        is_tied=values.get("tie_word_embeddings", False),
        has_qkv_bias=_switch(values, family.qkv_bias_key, family.has_qkv_bias),
        has_qk_norm=_switch(values, family.qk_norm_key, family.has_qk_norm),
        has_biases=family.has_biases,
        has_sinks=family.has_sinks,
        **window_fields(values, family, folder),
        unrotated_layers=unrotated_layers(values, family, folder),
        rotary_dim=_rotary_dim(values, rope, family),
        norms_all_heads=family.norms_all_heads,
        norms_behind=family.norms_behind,
        has_fused_files=family.has_fused_files,
        stretches_full_layers=family.stretches_full_layers,
        **mixture_fields(values, family.experts, folder),
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
    known = (*family.wrapper.text_types, *family.wrapper.others)
    if kind not in known:
        raise InputError(
            f"{folder}: the text model inside {family.architecture} is {kind!r} "
            f"(text_config.model_type); supported: {', '.join(known)}"
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
    if family.has_biases and not values["attention_bias"]:
        raise InputError(
            f"{folder}: attention_bias=false is not supported for {family.architecture}: true"
        )
    if values.get("quantization_config"):
        raise InputError(
            f"{folder}: quantised weights (quantization_config) are not supported: give the model "
            "in bfloat16, float16 or float32; `megatron-rl convert FOLDER TARGET --to hf` "
            "dequantises FP8 (DeepSeek-V3, Ministral 3) and MXFP4 (gpt-oss)"
        )
    if rope.get("partial_rotary_factor", 1) != 1 and not family.rotates_part:
        raise InputError(f"{folder}: partial_rotary_factor must be 1")


_LEAST_COMMON_SHARE = 0.95
"""Least share of common token ids: models of one family share more."""


def check_parallel(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Raise InputError unless the parallel sizes divide the model."""
    check_sizes(parallel, counts_of(shape))
    if shape.has_biases and parallel.expert_tensor > 1:
        # Megatron 0.16.1 (transformer_config.py:1588): every rank would add the whole bias.
        raise InputError(
            f"parallel.expert_tensor = {parallel.expert_tensor}: the experts of a "
            f"{shape.architecture} have biases, which ranks cannot share; nearest possible: 1"
        )


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


def check_teacher(
    teacher: ModelShape,
    policy: ModelShape,
    folder: Path,
    *,
    is_exact: bool,
    parallel: ParallelConfig | None = None,
) -> None:
    """Raise InputError unless the policy can be compared with the teacher, on the same ranks.

    Models of one family pad their vocabulary differently; ids that one of them lacks do not count.
    is_exact: whole distributions are compared. parallel: of the ranks; None: in an engine.
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
    if parallel is None:
        return
    try:
        check_parallel(teacher, parallel)
    except InputError as error:
        raise InputError(
            f"algorithm.reference.policy: the trainer's ranks cannot divide {folder}: {error}"
        ) from error
