"""A tensor that behaves as TransformerEngine's Float8Tensor does where a weight sync touches it.

Its class says bfloat16 or float32, but it holds codes and a scale: `view(torch.uint8)` gives the
codes, `dequantize` the values, and every other operation dequantises all of it first
(transformer_engine/pytorch/tensor/float8_tensor.py at v2.12, lines 541 and 1024). It stands in for
that class on hosts without CUDA, where it cannot be imported.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Quantised(Tensor):
    """int8 codes times a scale."""

    @staticmethod
    def __new__(
        cls: type["Quantised"], codes: Tensor, scale: float, dtype: torch.dtype
    ) -> "Quantised":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes: Tensor, scale: float, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.times = codes, scale, 0
        self.before_dequantising: Callable[[int], None] = lambda times: None

    def dequantize(self) -> Tensor:
        """[as the codes] of the nominal dtype; counted."""
        self.times += 1
        self.before_dequantising(self.times)
        return (self.codes.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.view.dtype and args[1] == torch.uint8:
            return args[0].codes.view(torch.uint8)
        if func is torch.ops.aten.detach.default:
            return args[0]

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, Quantised) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
