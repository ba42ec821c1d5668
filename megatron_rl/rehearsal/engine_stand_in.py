"""A package transformer_engine of shapes alone, for processes that rehearse a CUDA rank.

`install` puts it in place before Megatron-Core is imported, which then builds what it builds on a
GPU host. STAND_INS is held to the pinned package by tests/tools/test_conformance.
"""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.backend.fp8 import POSITION_MULTIPLE
from megatron_rl.rehearsal.engine_attention import DotProductAttention, apply_rotary_pos_emb
from megatron_rl.rehearsal.engine_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    FP8GlobalStateManager,
    Recipe,
    activation_recompute_forward,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
)
from megatron_rl.rehearsal.engine_layers import GroupedLinear, LayerNormLinear, Linear, RMSNorm

VERSION = "2.12.0"
"""That of requirements/gpu.txt."""


class FusedAdam(torch.optim.Optimizer):
    """Two moments for each parameter, and one kernel for many parameters."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of the parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter)
                parameter.add_(parameter.grad)


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Norm of all tensors, and of each."""
    return overflow.new_empty(1, dtype=torch.float32), overflow.new_empty(0, dtype=torch.float32)


def multi_tensor_scale(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    """Writes the first tensors, scaled, to the second."""


class MultiTensorApply:
    """Calls an operation on lists of tensors."""

    def __call__(self, operation: Callable[..., Any], *args: Any) -> Any:
        return operation(2048 * 32, *args)


class _Permute(torch.autograd.Function):
    """Rows of tokens in the order of experts, as often as each was chosen."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor | None, count: int) -> Any:
        ctx.shapes = tokens.shape, None if probs is None else probs.shape
        # Three numbers for each expert and token: the kernel's map of rows.
        rows = tokens.new_empty(len(tokens), 2, dtype=torch.int32)
        chosen = None if probs is None else probs.new_empty(count)
        return tokens.new_empty(count, *tokens.shape[1:]), chosen, rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_probs: Tensor | None, _: Any) -> Any:
        tokens, probs = ctx.shapes
        found = None if of_probs is None else of_probs.new_empty(probs)
        return grad.new_empty(tokens), found, None


class _Reorder(torch.autograd.Function):
    """Rows in another order, or summed to fewer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shape: Sequence[int]) -> Tensor:
        ctx.shape = rows.shape
        return rows.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.shape), None


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """(rows of experts, map of rows)."""
    result, _, rows = _Permute.apply(inp, None, num_out_tokens)
    return result, rows


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of experts, their probabilities, map of rows)."""
    result, chosen, rows = _Permute.apply(inp, probs, num_out_tokens)
    return result, chosen, rows


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    """Tokens in their own order, each the sum of its experts' rows."""
    assert restore_shape is not None and merging_probs is None
    return _Reorder.apply(inp, restore_shape)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Chunks of rows in another order."""
    return _Reorder.apply(inp, inp.shape)


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """The same with probabilities."""
    return _Reorder.apply(inp, inp.shape), _Reorder.apply(probs, probs.shape)


class Fp8Padding(torch.nn.Module):
    """Rows of each expert to a multiple, in FP8."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self._multiple = align_size or POSITION_MULTIPLE

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """(rows, rows of each expert)."""
        padded = [count + -count % self._multiple for count in m_splits]
        if padded == m_splits:
            return inp, m_splits
        return _Reorder.apply(inp, (sum(padded), *inp.shape[1:])), padded


class Fp8Unpadding(torch.nn.Module):
    """Back to the rows that were there."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """m_splits: rows of each expert without those that were added."""
        rows = sum(m_splits)
        return inp if rows == len(inp) else _Reorder.apply(inp, (rows, *inp.shape[1:]))


class _Unused:
    """Stands for what Megatron names and these layers never call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"a rehearsal has no {type(self).__name__}")


def _unused(name: str) -> type:
    return type(name, (_Unused,), {})


STAND_INS: dict[str, dict[str, Any]] = {
    "common.recipe": {
        "DelayedScaling": DelayedScaling,
        "Float8CurrentScaling": Float8CurrentScaling,
        "Float8BlockScaling": Float8BlockScaling,
    },
    "pytorch": {
        "Fp8Padding": Fp8Padding,
        "Fp8Unpadding": Fp8Unpadding,
        "fp8_autocast": fp8_autocast,
        "fp8_model_init": fp8_model_init,
        "Linear": Linear,
        "LayerNormLinear": LayerNormLinear,
        "RMSNorm": RMSNorm,
        "GroupedLinear": GroupedLinear,
        "DotProductAttention": DotProductAttention,
    },
    "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    "pytorch.distributed": {
        "activation_recompute_forward": activation_recompute_forward,
        "checkpoint": checkpoint,
    },
    "pytorch.fp8": {"fp8_autocast": fp8_autocast},
    "pytorch.optimizers": {"FusedAdam": FusedAdam, "multi_tensor_scale": multi_tensor_scale,
                           "multi_tensor_l2norm": multi_tensor_l2norm},
    "pytorch.permutation": {
        "moe_permute": moe_permute,
        "moe_permute_with_probs": moe_permute_with_probs,
        "moe_unpermute": moe_unpermute,
        "moe_sort_chunks_by_index": moe_sort_chunks_by_index,
        "moe_sort_chunks_by_index_with_probs": moe_sort_chunks_by_index_with_probs,
    },
}  # fmt: skip
"""Module of transformer_engine -> name -> what is called in its place."""
NAMED_ALONE: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": {"Recipe": Recipe, "Format": Format},
    "pytorch": {"LayerNorm": _unused("LayerNorm"), "LayerNormMLP": _unused("LayerNormMLP")},
    "pytorch.attention": {},
    "pytorch.distributed": {"CudaRNGStatesTracker": _unused("CudaRNGStatesTracker")},
    "pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager},
    "pytorch.float8_tensor": {"Float8Tensor": _unused("Float8Tensor")},
    "pytorch.tensor": {"QuantizedTensor": _unused("QuantizedTensor")},
    "pytorch.tensor.utils": {
        "replace_raw_data": _unused("replace_raw_data"),
        "cast_master_weights_to_fp8": _unused("cast_master_weights_to_fp8"),
    },
    "pytorch.optimizers": {"FusedSGD": _unused("FusedSGD"),
                           "multi_tensor_applier": MultiTensorApply()},
    "pytorch.ops": {name: _unused(name) for name in ("FusibleOperation", "Sequential", "SwiGLU")},
    "pytorch.router": {
        name: _unused(name)
        for name in ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
                     "fused_topk_with_score_function")
    },
}  # fmt: skip


def install() -> None:
    """Put the package in place. Call before Megatron-Core is imported.

    Raises RuntimeError afterwards, or where the real package was imported.
    """
    late = {"transformer_engine", "megatron.core.extensions.transformer_engine"} & set(sys.modules)
    if late:
        raise RuntimeError(f"{', '.join(sorted(late))} was imported before the rehearsal began")
    for table in (NAMED_ALONE, STAND_INS):
        for path, names in table.items():
            _module(path).__dict__.update(names)


def _module(path: str) -> ModuleType:
    name = f"transformer_engine.{path}".rstrip(".")
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []  # its submodules are in this table alone
        if path:
            parent, _, own = path.rpartition(".")
            setattr(_module(parent), own, module)
    return sys.modules[name]
