"""Rotary angles of the policy's model, and what multiplies its queries. Runs in trainer ranks."""

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.backend.context import positions_within
from megatron_rl.weights.layout.rope import RopeScaling
from megatron_rl.weights.layout.rotary import inverse_frequencies
from megatron_rl.weights.layout.shape import ModelShape


def set_rotation(module: GPTModel, shape: ModelShape, device: torch.device) -> None:
    """Give the model its rotary angles, and queries their factors."""
    set_angles(module, inverse_frequencies(shape).to(device))
    scaling = shape.rope_scaling
    if scaling is None:
        return
    if shape.stretches_full_layers:
        plain = inverse_frequencies(replace(shape, rope_scaling=None)).to(device)
        _stretch_full_layers(module, shape, scaling, plain)
    elif shape.scales_queries:
        scale_queries(module, scaling)


def set_angles(module: GPTModel, frequencies: torch.Tensor) -> None:
    """Give the model its rotary angles.

    Megatron knows no linear scaling, fixes llama3's constants, and its fused kernel has no factor
    for yarn: so the angles are given here, and the factor in `softmax_scale` or `set_factor`.
    """
    if not module.config.multi_latent_attention:
        module.rotary_pos_emb.inv_freq = frequencies
        return
    attentions = [one for one in module.modules() if isinstance(one, MultiLatentAttention)]
    for attention in attentions:
        # Each has its own embedding. One for all: Megatron keeps the latest 32 angles.
        attention.rotary_pos_emb = attentions[0].rotary_pos_emb
        attention.rotary_pos_emb.inv_freq = frequencies


def set_factor(config: TransformerConfig, factor: float) -> None:
    """Let Megatron multiply cosines and sines by `factor`, as its own yarn does.

    In 0.16.1: by 0.1 * yarn_mscale * log(yarn_rotary_scaling_factor) + 1, and not in the fused
    kernel.
    """
    if factor != 1:
        config.apply_rope_fusion = False
        config.yarn_rotary_scaling_factor, config.yarn_mscale_all_dim = math.e, 0.0
        config.yarn_mscale = 10 * (factor - 1)


def scale_queries(module: GPTModel, scaling: RopeScaling) -> None:
    """Let the queries of all layers grow with their position within the sequence.

    A hook, which Megatron's own layers and TransformerEngine's take alike. `scaling.query_beta`
    has the formula.
    """
    for attention in (one for one in module.modules() if isinstance(one, Attention)):
        core, context = attention.core_attention, attention.pg_collection.cp
        place = (context.rank(), context.size())

        def grown(
            core: Any, inputs: tuple[Any, ...], options: dict[str, Any], place: Any = place
        ) -> Any:
            query, *others = inputs
            packed = options["packed_seq_params"]
            # Packed: [tokens, heads, dim]; otherwise [length, batch, heads, dim], of no context.
            positions = (
                torch.arange(len(query), device=query.device)
                if packed is None
                else positions_within(packed.cu_seqlens_q, len(query), *place)
            )
            return (query * _factors(positions, scaling, query), *others), options

        core.register_forward_pre_hook(grown, with_kwargs=True)
        core.scales_queries = True


def _stretch_full_layers(
    module: GPTModel, shape: ModelShape, scaling: RopeScaling, frequencies: Tensor
) -> None:
    """Leave the angles of the model to layers without a window; the others have `frequencies`."""
    plain = copy.copy(module.rotary_pos_emb)
    plain.inv_freq = frequencies
    factor = scaling.attention_factor**2

    def plainly(_: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        # As many as Megatron has made; with context ranks too, all sequences are packed.
        angles = plain(len(options["rotary_pos_emb"]), packed_seq=True)
        return inputs, {**options, "rotary_pos_emb": angles}

    def multiplied(_: Any, inputs: tuple[Any, ...]) -> Any:
        return inputs[0] * factor, *inputs[1:]

    for attention in (one for one in module.modules() if isinstance(one, Attention)):
        if shape.window_of(attention.layer_number - 1):
            attention.register_forward_pre_hook(plainly, with_kwargs=True)
        else:
            attention.core_attention.register_forward_pre_hook(multiplied)
            attention.core_attention.scales_queries = True


def _factors(positions: Tensor, scaling: RopeScaling, query: Tensor) -> Tensor:
    """In the shape and the dtype that multiply `query`, whose first dimension is `positions`."""
    turns = torch.floor(positions / scaling.original_positions)
    factors = 1 + scaling.query_beta * torch.log(1 + turns)
    return factors.to(query.dtype).view(-1, *(1 for _ in query.shape[1:]))
