"""Which of Megatron's fused operations a model uses, and how its tokens reach their experts.

Runs in trainer ranks.
"""

from typing import Any

from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.transformer.moe import fused_a2a

from megatron_rl.config.errors import InputError
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import Fusion, ModelConfig

DEFAULT: tuple[Fusion, ...] = ("swiglu", "gradient_accumulation")
"""What "auto" means with TransformerEngine's layers, as in Megatron's own scripts."""
_FIELDS = {
    "swiglu": "bias_activation_fusion",
    "gradient_accumulation": "gradient_accumulation_fusion",
    "moe_permute": "moe_permute_fusion",
    "moe_router": "moe_router_fusion",
}


def transformer_fields(
    model: ModelConfig, *, has_experts: bool, has_engine: bool
) -> dict[str, Any]:
    """Fields of TransformerConfig that `expert.model.fusions` sets; they replace the backend's.

    Raises InputError for what the model or this host does not have.
    """
    if model.fusions == "auto":
        return {_FIELDS[name]: True for name in DEFAULT} if has_engine else {}
    wanted = list(model.fusions)
    if wanted and not has_engine:
        raise InputError(
            f"expert.model.fusions={wanted} needs TransformerEngine's layers (a CUDA device, the "
            "package transformer-engine, expert.model.layers not 'local'); nearest possible: []"
        )
    of_experts = [name for name in wanted if name.startswith("moe_")]
    if of_experts and not has_experts:
        left = [name for name in wanted if name not in of_experts]
        raise InputError(
            f"expert.model.fusions={wanted}: {model.path} is a dense model, which has no experts; "
            f"nearest possible: {left}"
        )
    return {_FIELDS[name]: True for name in wanted}


def accumulate_without_apex() -> None:
    """Let Megatron build models whose weight gradients are added to their float32 sums.

    megatron-core 0.16.1 asks for NVIDIA apex when it builds the output layer (layers.py:924).
    TransformerEngine's linears need no apex, and the output layer's products are ours.
    """
    linear_layers._grad_accum_fusion_available = True


def dispatcher_fields(
    parallel: ParallelConfig, *, has_experts: bool, has_engine: bool
) -> dict[str, Any]:
    """Fields of TransformerConfig that `expert.parallel.expert_exchange` sets.

    Raises InputError for what the model or this host does not have.
    """
    if parallel.expert_exchange == "all_to_all":
        return {"moe_token_dispatcher_type": "alltoall"}
    given = f"expert.parallel.expert_exchange={parallel.expert_exchange!r}"
    if not has_experts:
        raise InputError(f"{given} needs a mixture of experts: set 'all_to_all'")
    # Megatron asks for names that not every release of DeepEP has: SGLang's has not.
    if not has_engine or fused_a2a.fused_dispatch is None:
        raise InputError(
            f"{given} needs TransformerEngine's layers on CUDA and a package deep_ep that "
            "Megatron-Core can use (github.com/deepseek-ai/DeepEP, with EventOverlap in "
            "deep_ep.utils); one of them is missing here. Set 'all_to_all'"
        )
    return {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        # Its kernels take no other (megatron-core 0.16.1, token_dispatcher.py:1173).
        "moe_router_dtype": "fp32",
    }
