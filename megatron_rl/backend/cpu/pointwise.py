"""RMSNorm and SwiGLU for hosts without TransformerEngine: in one pass each on the CPU.

Used by trainer ranks. The loops are `kernels/pointwise.cpp`; elsewhere plain torch.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.backend.cpu.loops import is_bfloat16, library, library_for, pointer

SOURCE = "pointwise"


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor and the marks that Megatron expects."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # finalize_model_grads sums the gradients of marked parameters over the tensor group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
        if library_for(SOURCE, x) is None or x.dtype is not self.weight.dtype:
            return super().forward(x)
        return _Norm.apply(x, self.weight, self.eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        width = len(weight)
        result = torch.empty_like(x)
        inverse = torch.empty(x.numel() // width, dtype=torch.float32)
        library(SOURCE).rms_norm_forward(
            *map(pointer, (x, weight, result, inverse)),
            ctypes.c_long(len(inverse)),
            width,
            ctypes.c_float(eps),
            is_bfloat16(x),
        )
        ctx.save_for_backward(x, weight, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        library(SOURCE).rms_norm_backward(
            *map(pointer, (x, weight, grad.contiguous(), inverse, grad_x, grad_weight)),
            ctypes.c_long(len(inverse)),
            len(weight),
            is_bfloat16(x),
        )
        return grad_x, grad_weight.to(weight.dtype), None


class GatedMLP(MLP):
    """Megatron's MLP of a model without biases, with the gate in one pass."""

    row: type = RowParallelLinear

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules | None = None) -> None:
        # Megatron's layer knows MLP itself in specs, but no class of it.
        super().__init__(
            config,
            submodules or MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=self.row),
        )

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[..., hidden] and the bias that is left to add."""
        cfg = self.config
        is_plain = (
            per_token_scale is None and cfg.gated_linear_unit and cfg.activation_func is F.silu
        )
        if not is_plain or library_for(SOURCE, hidden_states) is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, bias = self.linear_fc1(hidden_states)
        assert bias is None, "biases of an MLP are not implemented"
        return self.linear_fc2(swiglu(both))


def swiglu(both: Tensor) -> Tensor:
    """silu(first half of the last dimension) * second half."""
    return _SwiGLU.apply(both)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        width = both.shape[-1] // 2
        result = both.new_empty(*both.shape[:-1], width)
        library(SOURCE).swiglu_forward(
            pointer(both),
            pointer(result),
            ctypes.c_long(result.numel() // width),
            width,
            is_bfloat16(both),
        )
        ctx.save_for_backward(both)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        grad_both = torch.empty_like(both)
        library(SOURCE).swiglu_backward(
            *map(pointer, (both, grad.contiguous(), grad_both)),
            ctypes.c_long(grad.numel() // grad.shape[-1]),
            grad.shape[-1],
            is_bfloat16(both),
        )
        return grad_both
