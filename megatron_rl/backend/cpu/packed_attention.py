"""Causal attention of packed sequences on the CPU in one call, and the layer that calls it.

Used by trainer ranks. The loops are `kernels/causal_attention.cpp`.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_rl.backend.cpu.folding import folding_of
from megatron_rl.backend.cpu.loops import is_bfloat16, library, library_for, pointer

SOURCE = "causal_attention"


class _Heads(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token", ctypes.c_long),
        ("group", ctypes.c_long),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("sequences", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("dim", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("bounds", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Attention:
    """Sizes of an attention and what its queries see."""

    heads: int
    groups: int
    dim: int
    scale: float
    bounds: Tensor  # [sequences + 1] int32: where each sequence starts, and the end
    window: int | None = None  # positions before its own that a query sees
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines: [longest, dim / 2] float32

    def shape(self) -> _Shape:
        """As the loops take it; valid while this object lives."""
        cosines, sines = map(pointer, self.angles) if self.angles else (None, None)
        return _Shape(
            len(self.bounds) - 1,
            self.heads,
            self.groups,
            self.dim,
            -1 if self.window is None else self.window,
            self.scale,
            pointer(self.bounds),
            cosines,
            sines,
        )

    def places(self, *inputs: Tensor) -> list[_Heads]:
        """Places of queries, keys and values: in three tensors, [tokens, heads, dim], or in one.

        One holds [tokens, groups * (heads / groups + 2) * dim]: the queries of a group, its key and
        its value, then the next group.
        """
        ratio = self.heads // self.groups
        if len(inputs) == 1:
            (mixed,) = inputs
            token, group = mixed.stride(0), (ratio + 2) * self.dim
            starts = (0, ratio * self.dim, (ratio + 1) * self.dim)
            return [_Heads(pointer(mixed, start), token, group) for start in starts]
        query, key, value = inputs
        return [
            _Heads(pointer(query), query.stride(0), ratio * self.dim),
            _Heads(pointer(key), key.stride(0), key.stride(1)),
            _Heads(pointer(value), value.stride(0), value.stride(1)),
        ]

    def result_place(self, result: Tensor) -> _Heads:
        """Of a contiguous [tokens, heads * dim]."""
        return _Heads(pointer(result), self.heads * self.dim, self.heads // self.groups * self.dim)


def can_attend(tensor: Tensor) -> bool:
    """Whether the loops are there for the tensor's device and dtype."""
    return library_for(SOURCE, tensor) is not None


def attend(attention: Attention, *inputs: Tensor, sinks: Tensor | None = None) -> Tensor:
    """[tokens, heads * dim] of inputs as `Attention.places` describes them.

    sinks: [heads], scores of a key that each query of a head sees, and whose value is 0.
    """
    return _Attend.apply(attention, sinks, *inputs)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: Attention, sinks: Tensor | None, *inputs: Tensor) -> Tensor:
        if len(inputs) == 3:
            query, key, value = inputs
            is_dense = key.stride(2) == value.stride(2) == 1
            inputs = (query.contiguous(), key, value)
            inputs = inputs if is_dense else tuple(tensor.contiguous() for tensor in inputs)
        else:
            inputs = (inputs[0].contiguous(),)
        tokens = len(inputs[0])
        result = inputs[0].new_empty(tokens, attention.heads * attention.dim)
        log_sums = torch.empty(tokens, attention.heads, dtype=torch.float32)
        library(SOURCE).attention_forward(
            ctypes.byref(attention.shape()),
            (_Heads * 3)(*attention.places(*inputs)),
            ctypes.byref(attention.result_place(result)),
            pointer(log_sums),
            is_bfloat16(result),
        )
        if sinks is not None:
            own, log_sums = log_sums, torch.logaddexp(log_sums, sinks.float())
            share = (own - log_sums).exp()[..., None]
            result = (result.view(*share.shape[:2], -1) * share).to(result.dtype).view_as(result)
        ctx.attention = attention
        ctx.save_for_backward(*inputs, result, log_sums, sinks)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, result, log_sums, sinks = ctx.saved_tensors
        attention: Attention = ctx.attention
        grad = grad.contiguous()
        gradients = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs]
        places = [*attention.places(*inputs), *map(attention.result_place, (result, grad))]
        library(SOURCE).attention_backward(
            ctypes.byref(attention.shape()),
            (_Heads * 5)(*places),
            pointer(log_sums),
            (_Heads * 3)(*attention.places(*gradients)),
            is_bfloat16(grad),
        )
        if sinks is None:
            return None, None, *gradients
        # As of any key's score: its probability times (0 - the sum of grad * result).
        shares = (sinks.float() - log_sums).exp()
        products = (grad.float() * result.float()).view(*shares.shape, -1).sum(-1)
        return None, -(shares * products).sum(0).to(sinks.dtype), *gradients


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention, whose products go to the loops unsplit where that is possible."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: [positions, 1, hidden] and the bias that is left to add."""
        folding = folding_of(packed_seq_params)
        if self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        if args or packed_seq_params is None or not self._is_plain(hidden_states, rotary_pos_emb):
            result, bias = super().forward(
                folding.unfold(hidden_states) if folding else hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
            return (folding.fold(result) if folding else result), bias
        mixed, _ = self.linear_qkv(hidden_states)
        attention = Attention(
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
            self.core_attention.scale,
            packed_seq_params.cu_seqlens_q,
            self.core_attention.window,
            None if rotary_pos_emb is None else angles(rotary_pos_emb),
        )
        rows = folding.unfold(mixed[:, 0]) if folding else mixed[:, 0]
        attended = attend(attention, rows, sinks=self.core_attention.softmax_offset)
        return self.linear_proj((folding.fold(attended) if folding else attended)[:, None])

    def _is_plain(self, hidden_states: Tensor, frequencies: Tensor | None) -> bool:
        """Whether nothing stands between the product, the rotation and the attention."""
        cfg = self.config
        return (
            isinstance(frequencies, Tensor | None)
            and (
                frequencies is None or frequencies.shape[-1] == self.hidden_size_per_attention_head
            )
            and can_attend(hidden_states)
            and not getattr(self.core_attention, "scales_queries", False)
            and self.pg_collection.cp.size() == 1
            and isinstance(self.q_layernorm, IdentityOp | None)
            and isinstance(self.k_layernorm, IdentityOp | None)
            # Else tensor ranks gather the keys that they have in common.
            and cfg.num_query_groups >= self.world_size
            and not cfg.rotary_interleaved
            and _yarn_get_concentration_factor_from_config(cfg) == 1.0
        )


@functools.lru_cache(maxsize=32)
def angles(frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of Megatron's [longest, 1, 1, dim], whose halves are equal.

    Kept by the tensor's identity: Megatron too keeps the latest ones.
    """
    half = frequencies[:, 0, 0, : frequencies.shape[-1] // 2].float()
    return half.cos(), half.sin()
