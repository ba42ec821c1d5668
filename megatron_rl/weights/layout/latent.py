"""Multi-head latent attention in the config.json of DeepSeek's models. Pure.

Queries, and keys with values, come from low-rank latents. The last dimensions of each key are
rotated and common to all heads. Source: arXiv 2405.04434, section 2.1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.rope import RopeScaling


def latent_fields(
    values: Mapping[str, Any], scaling: RopeScaling | None, folder: Path
) -> dict[str, Any]:
    """Fields of ModelShape for latent attention.

    `folder` is for messages. Raises InputError for what Megatron-Core 0.16.1 does not compute.
    """
    if not values["rope_interleave"]:
        raise InputError(f"{folder}: rope_interleave=false is not supported: true")
    if scaling is not None and scaling.kind != "yarn":
        raise InputError(
            f"{folder}: rope type {scaling.kind!r} is not supported in latent attention: default "
            "or yarn"
        )
    if scaling is not None and scaling.attention_factor != 1:
        raise InputError(
            f"{folder}: yarn multiplies cosines by {scaling.attention_factor:.4g}, which is not "
            "supported in latent attention: mscale and mscale_all_dim must be equal"
        )
    rotated = values["qk_rope_head_dim"]
    return {
        "q_rank": values["q_lora_rank"] or 0,
        "kv_rank": values["kv_lora_rank"],
        "value_dim": values["v_head_dim"],
        "head_dim": values["qk_nope_head_dim"] + rotated,
        "rotary_dim": rotated,
        # The latent gives each query head its own key and value.
        "kv_heads": values["num_attention_heads"],
    }
