"""Multi-head latent attention and rotary angles of the policy's model. Runs in trainer ranks."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from megatron_rl.weights.layout.shape import ModelShape


def set_angles(module: GPTModel, frequencies: torch.Tensor) -> None:
    """Give the model its rotary angles.

    Megatron knows no linear scaling, fixes llama3's constants, and its fused kernel has no factor
    for yarn: so the angles are given here, and the factor in `softmax_scale`.
    """
    if not module.config.multi_latent_attention:
        module.rotary_pos_emb.inv_freq = frequencies
        return
    attentions = [one for one in module.modules() if isinstance(one, MultiLatentAttention)]
    for attention in attentions:
        # Each has its own embedding. One for all: Megatron keeps the latest 32 angles.
        attention.rotary_pos_emb = attentions[0].rotary_pos_emb
        attention.rotary_pos_emb.inv_freq = frequencies


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
