"""Experts of the policy's model. Runs in trainer ranks."""

from typing import Any

import torch

from megatron_rl.weights.layout.shape import ModelShape


def mixture_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TransformerConfig that describe experts and routers; {} for a dense model."""
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.moe_ffn,
        "moe_router_topk": shape.experts_per_token,
        # A softmax over the chosen experts alone is the softmax over all, normalised afterwards.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        "moe_router_num_groups": shape.expert_groups if shape.expert_groups > 1 else None,
        "moe_router_group_topk": shape.chosen_groups if shape.expert_groups > 1 else None,
        # A list makes the names of layers in checkpoints other ones: see `megatron_folder.py`.
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.layers)]
        if shape.dense_layers
        else 1,
        **(_corrected_router(shape) if shape.is_router_corrected else {}),
    }


def _corrected_router(shape: ModelShape) -> dict[str, Any]:
    """A router of sigmoid scores, whose choice an untrained buffer corrects."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": shape.routed_scale,
        "moe_router_enable_expert_bias": True,
        # Megatron would move it towards equal loads; with 0 it adds zeros.
        "moe_router_bias_update_rate": 0.0,
    }


def mark_divided(module: torch.nn.Module) -> None:
    """Make Megatron reduce and count the gradients of experts among expert ranks, and of sinks.

    Experts are whole on a rank; their replicas are all ranks of a stage with the same experts,
    tensor ranks too. megatron-core 0.16.1 sets no marks for a single expert rank
    (layers.py:886), and would then sum over data-parallel ranks only. It sets none for sinks,
    of which each tensor rank holds those of its heads.
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
            # It marks the bias of an expert's last product, whose gradient would be summed twice.
            parameter.sequence_parallel = False
        if ".experts." in name or name.endswith(".softmax_offset"):
            # Otherwise the gradient norm would count it on the first tensor rank only.
            parameter.tensor_model_parallel = True
