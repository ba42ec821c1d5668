"""Loads SGLang's fused layer of queries, keys and values on pretended ranks; run as a script.

SGLang's CPU mode pads key-value heads where it would replicate them on a GPU, so no server shows
how ranks share them. Prints the slices compared; exits with an error where one differs.
"""

import torch
from sglang.srt.layers import linear

from megatron_rl.weights.layout.engine_layout import engine_slices
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share, as_matrix, local_part

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM", layers=1, hidden=8, ffn=64, heads=8, kv_heads=2, head_dim=4,
    vocab=1000, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, is_tied=True,
    has_qkv_bias=True, has_qk_norm=False, sliding_window=None,
)  # fmt: skip
LAYER = "model.layers.0.self_attn"


def compare(rank: int, size: int) -> int:
    """Slices compared of one rank."""
    tensors = {}
    for part, heads in (("q", SHAPE.heads), ("k", SHAPE.kv_heads), ("v", SHAPE.kv_heads)):
        rows = heads * SHAPE.head_dim
        tensors[f"{part}_proj.weight"] = torch.randn(rows, SHAPE.hidden)
        tensors[f"{part}_proj.bias"] = torch.randn(rows)
    linear._resolve_linear_group = lambda _: linear._LogicalGroup(rank, size)
    layer = linear.QKVParallelLinear(
        SHAPE.hidden, SHAPE.head_dim, SHAPE.heads, SHAPE.kv_heads, bias=True
    )
    for kind, parameter in layer.named_parameters():
        for part in "qkv":
            parameter.weight_loader(parameter, tensors[f"{part}_proj.{kind}"], part)
    parameters = {f"{LAYER}.qkv_proj.{kind}": held for kind, held in layer.named_parameters()}
    slices = [one for one in engine_slices(SHAPE, Share(rank, size)) if one.local in parameters]
    for part in slices:
        whole = as_matrix(tensors[part.hf.removeprefix(f"{LAYER}.")])
        rows = whole[part.row : part.row + part.rows]
        if not torch.equal(local_part(parameters, part), rows):
            raise SystemExit(f"rank {rank} of {size}: {part}")
    covered = sum(part.size for part in slices)
    if covered != sum(held.numel() for held in parameters.values()):
        raise SystemExit(f"rank {rank} of {size}: not covered")
    return len(slices)


if __name__ == "__main__":
    print(sum(compare(rank, size) for size in (1, 2, 4, 8) for rank in range(size)))
