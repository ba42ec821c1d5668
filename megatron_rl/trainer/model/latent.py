"""Multi-head latent attention of the policy's model. Runs in trainer ranks."""

from typing import Any

from megatron_rl.weights.layout.shape import ModelShape


def latent_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of MLATransformerConfig that ordinary attention does not have, or has otherwise."""
    scaling = shape.rope_scaling
    return {
        "q_lora_rank": shape.q_rank or None,
        "kv_lora_rank": shape.kv_rank,
        "qk_head_dim": shape.nope_dim,
        "qk_pos_emb_head_dim": shape.rotary_dim,
        "v_head_dim": shape.value_dim,
        "qk_layernorm": True,
        # Megatron's own embedding for yarn is not used: see `set_angles`. Its factor of scores is.
        "rope_type": "rope",
        "rotary_base": shape.rope_theta,
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if scaling else 0.0,
        # The fused kernel takes the angles of that embedding.
        "apply_rope_fusion": False,
    }
