"""TransformerEngine's attention and rotation without their kernels, by shape.

Used by rehearsed ranks, as `engine_layers.py`. A kernel keeps its inputs, its result and one
float32 sum for each query and head. Context ranks pass keys and values around a ring, as the class
AttnFuncWithCPAndKVP2P of transformer-engine 2.12.0.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.backend.environment import BATCHED_RING, RANK_SETTINGS
from megatron_rl.plan.flops import causal_pairs
from megatron_rl.rehearsal import observed


def attention_flops(
    lengths: Sequence[int], heads: int, dim: int, ranks: int, window: int | None
) -> int:
    """Of the forward pass of causal attention on one of the context ranks: two products."""
    # Here a window counts the positions before a query's own.
    total = sum(causal_pairs(n, None if window is None else window + 1) for n in lengths)
    return 4 * heads * dim * total // ranks


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None,
        layer: "DotProductAttention",
        flops: int,
    ) -> Tensor:
        """scores: the heads' sinks or a mask, which take part in the softmax."""
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty(*query.shape[:-1], dtype=torch.float32)
        if layer.ranks > 1:
            # The ring's tensor has keys and values; the backward pass starts from it.
            pair = torch.cat([key.flatten(), value.flatten()])
            _send_round(layer, pair)
            ctx.save_for_backward(query, pair, result, sums, scores)
        else:
            ctx.save_for_backward(query, key, value, result, sums, scores)
        observed.add_flops(flops)
        ctx.layer, ctx.flops, ctx.shapes = layer, flops, (key.shape, value.shape)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, *_, scores = ctx.saved_tensors
        if ctx.layer.ranks > 1:
            _send_back(ctx.layer, ctx.saved_tensors[1])
        # Two more products than forward, and the scores again.
        observed.add_flops(ctx.flops * 5 // 2)
        found = [query.new_empty(shape) for shape in (query.shape, *ctx.shapes)]
        of_scores = torch.empty_like(scores) if ctx.needs_input_grad[3] else None
        return *found, of_scores, None, None


def _send_round(layer: "DotProductAttention", pair: Tensor) -> None:
    """Keys and values to the next rank, as often as there are other ranks."""
    buffers = [pair]
    for _ in range(layer.ranks - 1):
        buffers.append(torch.empty_like(pair))
        _exchange(layer, buffers[-2], buffers[-1])


def _send_back(layer: "DotProductAttention", pair: Tensor) -> None:
    """Keys and values with their gradients; the first time the former, the last time the latter."""
    buffers = [pair.new_empty(2, *pair.shape) for _ in range(2)]
    for turn in range(layer.ranks):
        sent, got = buffers[turn % 2], buffers[(turn + 1) % 2]
        if turn == 0:
            sent, got = sent[0], got[0]
        if turn == layer.ranks - 1:
            sent, got = sent[1], got[1]
        _exchange(layer, sent, got)


def _exchange(layer: "DotProductAttention", sent: Tensor, got: Tensor) -> None:
    group, rank = layer.cp_group, layer.cp_group.rank()
    target = layer.cp_global_ranks[(rank + 1) % layer.ranks]
    source = layer.cp_global_ranks[(rank - 1) % layer.ranks]
    pairs = [(dist.isend, sent, target), (dist.irecv, got, source)]
    if rank % 2:
        pairs.reverse()
    if layer.ranks == 2 or int(os.environ.get(BATCHED_RING, RANK_SETTINGS[BATCHED_RING])):
        dist.batch_isend_irecv([dist.P2POp(*pair, group) for pair in pairs])
        return
    # Both are issued before the rank waits for one of them.
    works = [issue(tensor, peer, group) for issue, tensor, peer in pairs]
    for work in works:
        work.wait()


class DotProductAttention(torch.nn.Module):
    """As transformer_engine.pytorch.DotProductAttention, for causal packed sequences."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self.ranks = 1 if cp_group is None else cp_group.size()
        assert self.ranks == 1 or cp_comm_type == "p2p", "only the ring is rehearsed"
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks or []
        self.window = window_size[0] if window_size and window_size[0] >= 0 else None
        self.softmax_offset = None
        if softmax_type == "learnable":
            assert self.ranks == 1, "the ring knows no sinks"
            # In float32, whatever the dtype of other parameters.
            offset = torch.empty(num_attention_heads // tp_size)
            self.softmax_offset = torch.nn.Parameter(offset)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        """[tokens, heads * dim] of [tokens, heads, dim]."""
        assert qkv_format == "thd" and cu_seqlens_q is not None, "the trainer packs sequences"
        _, heads, dim = query_layer.shape
        lengths = observed.read_lengths(cu_seqlens_q)
        flops = attention_flops(lengths, heads, dim, self.ranks, self.window)
        sinks = self.softmax_offset
        if sinks is not None:
            sinks = sinks.reshape(1, -1, 1, 1).float()
        result = _Attend.apply(query_layer, key_layer, value_layer, sinks, self, flops)
        return result.flatten(1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's scaled_dot_product_attention, whose kernel for a device without data is naive.

    [batch, heads, length, dim]; attention is causal, whether by a mask or not.
    """
    batch, heads, length, dim = query.shape
    flops = batch * attention_flops([key.shape[2]], heads, dim, 1, None)
    # Queries are the last positions of the keys.
    flops = flops * length // key.shape[2]
    return _Attend.apply(query, key, value, attn_mask, _ALONE, flops)


class _Alone:
    ranks = 1


_ALONE: Any = _Alone()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return torch.empty_like(inputs, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(grad, memory_format=torch.contiguous_format), None


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Queries or keys rotated in one kernel: the shape of the input."""
    return _Rotate.apply(t, freqs)
