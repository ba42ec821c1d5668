"""Attention of the local layers against a slow, obvious version."""

import math

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.backend.cpu_layers import CausalAttention
from megatron_rl.model import packed

HEADS, KV_HEADS, DIM = 6, 2, 4


def attention(window: int | None) -> CausalAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        window_size=(window - 1, 0) if window else None,
    )
    return CausalAttention(config, 1, AttnMaskType.causal, "self")


def attend_slowly(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """[length, heads, dim] in, [length, heads * dim] out; one head and one token at a time."""
    out = torch.zeros_like(query)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for t in range(len(query)):
            first = 0 if window is None else max(0, t - window + 1)
            scores = key[first : t + 1, group] @ query[t, head] / math.sqrt(DIM)
            out[t, head] = scores.softmax(0) @ value[first : t + 1, group]
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_and_padded_attention_equal_the_slow_version(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 9, 5]
    query, key, value = (
        torch.randn(sum(lengths), heads, DIM, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    pieces = [tensor.split(lengths) for tensor in (query, key, value)]
    expected = [attend_slowly(q, k, v, window) for q, k, v in zip(*pieces, strict=True)]
    core = attention(window)

    result = core(query, key, value, None, packed_seq_params=packed(lengths))
    torch.testing.assert_close(result, torch.cat(expected))
    weights = torch.randn_like(result)
    grads = torch.autograd.grad((result * weights).sum(), [query, key, value])
    slow = torch.autograd.grad((torch.cat(expected) * weights).sum(), [query, key, value])
    for ours, theirs in zip(grads, slow, strict=True):
        torch.testing.assert_close(ours, theirs)

    batch = [torch.stack([piece[0], piece[3]], dim=1) for piece in pieces]
    torch.testing.assert_close(core(*batch, None), torch.stack([expected[0], expected[3]], dim=1))


def test_other_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="only causal"):
        CausalAttention(attention(None).config, 1, AttnMaskType.no_mask, "self")
