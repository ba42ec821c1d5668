"""Experts and routers in a model's config.json. Pure functions of its values."""

from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.hf_config import dense_count
from megatron_rl.weights.layout.families.family import Experts

GELU_SLOPE = 1.702
"""Of the sigmoid in Megatron's quick_gelu, and in gpt-oss's experts."""


def mixture_fields(values: dict[str, Any], experts: Experts | None, folder: Path) -> dict[str, Any]:
    """The fields of ModelShape that describe experts; {} for a dense model. Raises InputError."""
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
    is_clamped = experts.fused == "pairs"
    if is_clamped and (alpha := values.get("swiglu_alpha", GELU_SLOPE)) != GELU_SLOPE:
        raise InputError(f"{folder}: swiglu_alpha={alpha} is not supported: {GELU_SLOPE}")
    return {
        "experts": count,
        "experts_per_token": per_token,
        "glu_limit": float(values["swiglu_limit"]) if is_clamped else 0.0,
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
