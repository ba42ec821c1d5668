"""FP8 training through TransformerEngine: recipes, and parameters that are kept in FP8.

Used by trainer ranks. A recipe says how the scales of a tensor are found: from the maxima of steps
before (delayed), from its own maximum (tensorwise), or from those of its blocks (blockwise).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ModelConfig

POSITION_MULTIPLE = 16
"""FP8 matrix products need as many positions on each rank, or a multiple."""
BLOCK = 128
"""Elements that share a scale in the blockwise recipe."""
# Gradients reach further than E4M3 goes, unless each block has its own scale.
_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3"}


def position_multiple(model: ModelConfig, *, is_gathered: bool) -> int:
    """Of how many positions each rank needs a multiple.

    is_gathered: whether tensor ranks divide the positions between their layers.
    """
    if model.fp8 == "none":
        return 1
    # TransformerEngine 2.12 gathers whole blocks alone (utils.py: assert_dim_for_all_gather).
    return BLOCK if model.fp8 == "blockwise" and is_gathered else POSITION_MULTIPLE


def transformer_fields(
    model: ModelConfig, *, stage_layers: int, has_experts: bool, gathered_width: int = 0
) -> dict[str, Any]:
    """TransformerConfig fields for the run's recipe; {} without FP8.

    stage_layers: layers of a pipeline stage; gathered_width: of the hidden states that tensor ranks
    gather, if they do. Raises InputError for more edge layers than that, and for a width without
    whole blocks.
    """
    if model.fp8 == "none":
        return {}
    if model.fp8 == "blockwise" and gathered_width % BLOCK:
        raise InputError(
            f"model.fp8 = 'blockwise' with parallel.sequence needs a hidden size divisible by "
            f"{BLOCK}, and {model.path} has {gathered_width}; nearest possible: 'tensorwise'"
        )
    edge = model.fp8_bf16_edge_layers
    if edge > stage_layers:
        raise InputError(
            f"expert.model.fp8_bf16_edge_layers = {edge} is more than the {stage_layers} layers of "
            f"a pipeline stage; nearest possible: {stage_layers}"
        )
    return {
        "fp8": _FORMATS[model.fp8],
        "fp8_recipe": model.fp8,
        "fp8_param": model.fp8_parameters,
        "first_last_layers_bf16": edge > 0,
        "num_layers_at_start_in_bf16": edge,
        "num_layers_at_end_in_bf16": edge,
        # The products of experts need a multiple of positions too, each of its own count.
        "moe_router_padding_for_quantization": has_experts,
    }


def exact_values(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """What to write loaded weights into: the parameters, but for those kept in FP8.

    TransformerEngine holds the initial value of such a parameter in the compute dtype until the
    optimizer takes its float32 master from there. Call `round_to_fp8` once all are written.
    """
    return {name: _initial_value(parameter) for name, parameter in parameters.items()}


def round_to_fp8(parameters: Iterable[Tensor]) -> None:
    """Give parameters that are kept in FP8 the values that `exact_values` gave out for them."""
    for parameter in parameters:
        value = _initial_value(parameter)
        if value is not parameter:
            parameter.copy_(value.to(parameter.device))


def free_codes(chunks: Iterable[torch.nn.Module]) -> None:
    """Free the FP8 copies of weights that layers keep; a layer's next pass makes them again.

    For a model that leaves the device: TransformerEngine 2.12 keeps the copies from one microbatch
    to the next, and never frees them itself (module/base.py: get_weight_workspace).
    """
    for chunk in chunks:
        for module in chunk.modules():
            codes = getattr(module, "_fp8_workspaces", None)
            if codes is not None:
                codes.clear()


def _initial_value(parameter: Tensor) -> Tensor:
    get = getattr(parameter, "get_high_precision_init_val", None)
    return parameter if get is None else get()
