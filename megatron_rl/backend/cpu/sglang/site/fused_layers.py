"""Norms, activations and rotary embeddings in one pass over memory each.

Imported by SGLang's scheduler processes on the CPU, where SGLang 0.5.23 makes them of ten small
torch operators a layer. What the loops do not know keeps SGLang's own code.
"""

from types import ModuleType
from typing import Any

import torch

from megatron_rl.backend.cpu.kernels import engine_loops


def install_norm(module: ModuleType) -> None:
    """Let `sglang.srt.layers.layernorm` use the loops."""
    native = module.RMSNorm.forward_native

    def forward_native(
        self: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: Any = None,
    ) -> Any:
        if (
            post_residual_addition is not None
            or not is_plain_norm(self)
            or not _can_norm(x, residual, self.weight)
        ):
            return native(self, x, residual, post_residual_addition, quant_linear)
        # As on CUDA, the residual is updated in place.
        out = engine_loops.add_norm(x, residual, self.weight, self.variance_epsilon)
        return out if residual is None else (out, residual)

    if engine_loops.are_available():
        module.RMSNorm.forward_native = forward_native


def is_plain_norm(norm: Any) -> bool:
    """Whether it is x * rsqrt(mean of squares) * weight, in float32, of the whole row."""
    return (
        norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
    )


def _can_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> bool:
    tensors = (x,) if residual is None else (x, residual)
    return (
        x.dim() == 2
        and x.shape[1] == weight.shape[0] <= engine_loops.WIDTH_MAX
        and all(tensor.is_contiguous() and tensor.shape == x.shape for tensor in tensors)
        and engine_loops.can_run(*tensors, weight)
    )


def install_activation(module: ModuleType) -> None:
    """Let `sglang.srt.layers.activation` use the loops."""
    native = module.SiluAndMul.forward_native

    def forward_native(self: Any, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        is_fit = x.dim() == 2 and x.is_contiguous() and half % engine_loops.WIDTH_MULTIPLE == 0
        if not is_fit or not engine_loops.can_run(x):
            return native(self, x)
        return engine_loops.silu_multiply(x)

    if engine_loops.are_available():
        module.SiluAndMul.forward_native = forward_native


def install_rotary(module: ModuleType) -> None:
    """Let `sglang.srt.layers.rotary_embedding.base` use the loops."""
    native = module.RotaryEmbedding.forward_native

    def forward_native(
        self: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (
            offsets is not None
            or fused_set_kv_buffer_arg is not None
            or not can_rotate(self, positions, query, key)
        ):
            return native(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
        # In place, as on CUDA: they are parts of one product that nobody else reads.
        engine_loops.rotate(query, self.head_size, self.cos_sin_cache, positions)
        engine_loops.rotate(key, self.head_size, self.cos_sin_cache, positions)
        return query, key

    if engine_loops.are_available():
        module.RotaryEmbedding.forward_native = forward_native


def can_rotate(rotary: Any, positions: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Whether the loops can turn these heads, [tokens, heads * head size]."""
    table = rotary.cos_sin_cache
    return (
        rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == table.shape[1]
        and rotary.head_size % engine_loops.WIDTH_MULTIPLE == 0
        and not hasattr(rotary, "sin_cos_cache")
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and table.is_contiguous()
        and all(tensor.dim() == 2 for tensor in tensors)
        and engine_loops.can_run(table, *tensors)
    )
