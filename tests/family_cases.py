"""Tiny configurations of every model family, made from its table alone; shared by tests."""

from typing import Any

from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Experts, Family

LAYERS = 4
ENDING = "ForCausalLM"


def family_cases() -> list[Any]:
    """(transformers' name, options) of each family that stands alone, twice."""
    return [
        (architecture.removesuffix(ENDING), options)
        for architecture, family in FAMILIES.items()
        if family.wrapper is None
        for options in (_even(family), _odd(family))
    ]


def _even(family: Family) -> dict[str, Any]:
    """Sizes that two ranks can divide; optional parts are left out."""
    options: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "head_dim" in family.defaults:
        # The heads together are not as wide as the hidden state.
        options["head_dim"] = 24
    if family.has_window:
        options["sliding_window"] = None
    return options | _parts(family, is_odd=False)


def _odd(family: Family) -> dict[str, Any]:
    """Sizes that three ranks can divide, with the optional parts; embeddings are tied."""
    options: dict[str, Any] = {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3,
        "intermediate_size": 102, "tie_word_embeddings": True,
    }  # fmt: skip
    if "head_dim" in family.defaults:
        options["head_dim"] = 16
    if family.has_window:
        options["sliding_window"] = 12
    optional = (family.qkv_bias_key, family.qk_norm_key)
    options |= {key: True for key in optional if key}
    return options | _parts(family, is_odd=True)


def _parts(family: Family, *, is_odd: bool) -> dict[str, Any]:
    """What the table says that the family has."""
    options: dict[str, Any] = {}
    if family.rotates_part and "longrope" not in family.rope_types:
        options["partial_rotary_factor"] = 0.5
    if family.mixes_windows:
        kinds = ["sliding_attention", "full_attention"]
        options |= {"sliding_window": 12, "layer_types": kinds * (LAYERS // 2)}
        options |= {key: True for key in ("use_sliding_window",) if key in family.defaults}
    if family.rotates_some:
        options["no_rope_layers"] = [1, 0, 0, 1] if is_odd else [1] * LAYERS
    if family.scales_queries:
        options["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        }  # fmt: skip
    if family.is_latent:
        options |= {
            "num_key_value_heads": 6 if is_odd else 4, "kv_lora_rank": 24, "v_head_dim": 12,
            "q_lora_rank": None if is_odd else 40, "qk_rope_head_dim": 16, "qk_nope_head_dim": 20,
        }  # fmt: skip
    options |= _experts(family.experts, is_odd=is_odd) if family.experts else {}
    if "first_k_dense_replace" in family.engine_keys:
        # What transformers reads instead.
        dense = options["first_k_dense_replace"]
        options["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (LAYERS - dense)
    return options


def _experts(experts: Experts, *, is_odd: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        experts.count_keys[0]: 6 if is_odd else 8, "num_experts_per_tok": 3 if is_odd else 2,
        experts.units_key: 36 if is_odd else 48,
    }  # fmt: skip
    if experts.normalises is None:
        options["norm_topk_prob"] = experts.is_corrected or not is_odd
    if experts.shared:
        options["n_shared_experts"] = 1 if is_odd else 2
    if experts.is_corrected:
        options |= {
            "first_k_dense_replace": 2 if is_odd else 1, "routed_scaling_factor": 1.7,
            "n_group": 3 if is_odd else 4, "topk_group": 2, "num_experts_per_tok": 4,
        }  # fmt: skip
    return options
