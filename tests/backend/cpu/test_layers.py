"""Attention of the local layers against a slow, obvious version."""

import math

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.backend.context import gathered_places, positions_within, shard_positions
from megatron_rl.backend.cpu import patches
from megatron_rl.backend.cpu.layers import CausalAttention
from megatron_rl.trainer.model.build import packed
from tests.distributed import run_ranks

HEADS, KV_HEADS, DIM = 6, 2, 4


def attention(
    window: int | None, groups: ProcessGroupCollection | None = None, softmax_type: str = "vanilla"
) -> CausalAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        window_size=(window - 1, 0) if window else None,
        softmax_type=softmax_type,
    )
    return CausalAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


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


def largest_kept(core: CausalAttention, length: int) -> int:
    """Elements of the largest tensor that the backward pass of one sequence needs."""
    sizes: list[int] = []
    inputs = [torch.randn(1, length, h, DIM).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        core._attend(*inputs)
    return max(sizes)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("window", [None, 5])
def test_no_scores_of_all_heads_and_pairs_are_kept(window: int | None, softmax_type: str) -> None:
    length = 256
    core = attention(window, softmax_type=softmax_type)
    if core.softmax_offset is not None:
        core.softmax_offset.data.zero_()
    # A sink adds a position, and 8 dimensions to each head.
    more = softmax_type == "learnable"
    rows = (length + more) * HEADS * (DIM + 8 * more)
    # The mask of a window, which all heads share; a sink has a column in it.
    mask = length * (length + more) if window else 0
    assert largest_kept(core, length) == max(rows, mask)
    assert max(rows, mask) < HEADS * length * length / 3


def random_inputs(lengths: list[int]) -> list[Tensor]:
    """Query, key and value of all positions, and the weights of the result in a sum."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    query, key, value, weights = (torch.randn(sum(lengths), count, DIM) for count in heads)
    return [query, key, value, weights.flatten(1)]


def attend_on_rank(lengths: list[int], window: int | None) -> list[Tensor]:
    """The positions that this context rank holds, its part of the result, and its gradients."""
    dist.init_process_group()
    patches.install()
    params = packed(lengths)
    own = shard_positions(params.cu_seqlens_q, dist.get_rank(), dist.get_world_size())
    *inputs, weights = (tensor[own] for tensor in random_inputs(lengths))
    for tensor in inputs:
        tensor.requires_grad_()
    core = attention(window, ProcessGroupCollection(cp=dist.group.WORLD))
    result = core(*inputs, None, packed_seq_params=params)
    gradients = torch.autograd.grad((result * weights).sum(), inputs)
    return [own, result.detach(), *gradients]


@pytest.mark.parametrize(("ranks", "window"), [(2, None), (2, 5), (3, 3)])
def test_context_ranks_together_equal_the_slow_version(ranks: int, window: int | None) -> None:
    lengths = [24, 12, 12]
    *inputs, weights = random_inputs(lengths)
    for tensor in inputs:
        tensor.requires_grad_()
    pieces = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
    expected = torch.cat([attend_slowly(*piece, window) for piece in pieces])
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    together = [
        torch.cat(parts)
        for parts in zip(*run_ranks(attend_on_rank, ranks, lengths, window), strict=True)
    ]
    order = together[0].argsort()
    for found, wanted in zip(together[1:], (expected, *gradients), strict=True):
        torch.testing.assert_close(found[order], wanted)


def test_a_context_rank_holds_an_early_and_a_late_chunk_of_each_sequence() -> None:
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert shard_positions(bounds, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert shard_positions(bounds, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    assert shard_positions(bounds, 0, 1).tolist() == list(range(12))
    for ranks in (1, 2):
        of_all = torch.cat([shard_positions(bounds, rank, ranks) for rank in range(ranks)])
        assert torch.equal(of_all[gathered_places(bounds, 12, ranks)], torch.arange(12))
        for rank in range(ranks):
            own = shard_positions(bounds, rank, ranks)
            starts = torch.tensor([max(int(e) for e in bounds[:-1] if e <= at) for at in own])
            assert torch.equal(positions_within(bounds, len(own), rank, ranks), own - starts)


def test_other_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="only causal"):
        CausalAttention(attention(None).config, 1, AttnMaskType.no_mask, "self")
