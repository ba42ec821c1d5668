"""TransformerEngine's layers without its kernels: what they keep, compute and send, by shape.

Used by rehearsed ranks, where they stand in the package's place (`engine_stand_in.py`), so that
Megatron-Core's own classes for it are built and run. Written after transformer-engine 2.12.0,
without userbuffers. `tools.conformance` compares names and arguments with the pinned package.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.rehearsal import observed
from megatron_rl.rehearsal.engine_codes import Codes, quantized_weight
from megatron_rl.rehearsal.engine_fp8 import DelayedScaling, FP8GlobalStateManager, Maxima
from megatron_rl.rehearsal.engine_fp8_products import (
    Fp8GroupedProduct,
    Fp8NormedProduct,
    Fp8Product,
)
from megatron_rl.rehearsal.engine_products import GroupedProduct, Norm, NormedProduct, Product


class _Layer(torch.nn.Module):
    """What Megatron expects of every layer of the engine, and its state in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self._fp8_workspaces: dict[str, Codes] = {}
        """Of weights, by name, from one microbatch to the next."""
        self._maxima: Maxima | None = None
        self.save_original_input = False
        """For the gradient of the weight, in the place of codes; set by Megatron."""

    def begin_fp8(self, like: Tensor, products: int = 1) -> bool:
        """Whether products are in FP8 now. Under delayed scaling the layer's maxima are known."""
        manager = FP8GlobalStateManager
        recipe = manager.get_fp8_recipe()
        if not manager.is_fp8_enabled():
            return False
        if isinstance(recipe, DelayedScaling) and self._maxima is None:
            self._maxima = Maxima(recipe, products, like.device)
            manager.maxima.setdefault(manager.state.group, []).append(self._maxima)
        return True

    def quantized(self, weight: Tensor, name: str, columns: bool, is_first: bool | None) -> Codes:
        """Codes of a weight, which stay."""
        assert is_first is not None, "codes of weights are cached"
        with observed.in_purpose("codes of weights"):
            found = self._fp8_workspaces[name] = quantized_weight(
                self._fp8_workspaces.get(name),
                weight,
                FP8GlobalStateManager.get_fp8_recipe(),
                with_columns=columns,
                is_first=is_first,
            )
        return found

    def set_extra_state(self, state: Any) -> None:
        """Does nothing, as no checkpoint is read."""

    def get_extra_state(self) -> None:
        """As above."""


class Linear(_Layer):
    """As transformer_engine.pytorch.Linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.return_bias, self.apply_bias = return_bias, bias and not return_bias
        if parallel_mode == "column":
            out_features //= tp_size
        elif parallel_mode == "row":
            in_features //= tp_size
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter(out_features, in_features, params_dtype, device)
        if tp_size > 1:
            _mark(self.weight, dimension=1 if parallel_mode == "row" else 0)
        self.bias = _parameter(out_features, None, params_dtype, device) if bias else None
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif bias and tp_size > 1:
            _mark(self.bias, dimension=0)

    @property
    def gathers(self) -> bool:
        """Whether the input is divided by positions."""
        return self.parallel_mode == "column" and self.sequence_parallel

    @property
    def gathers_gradients(self) -> bool:
        """Whether the result is divided by positions."""
        return self.parallel_mode == "row" and self.sequence_parallel

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[positions, ..., out]; with the bias where the caller adds it."""
        given = (inp, self.weight, self.bias, self)
        if self.begin_fp8(inp):
            result = Fp8Product.apply(*given, torch.is_grad_enabled(), is_first_microbatch)
        else:
            result = Product.apply(*given)
        return (result, self.bias) if self.return_bias else result


class LayerNormLinear(Linear):
    """As transformer_engine.pytorch.LayerNormLinear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        kind, device = options.get("params_dtype"), options.get("device")
        self.layer_norm_weight = _parameter(in_features, None, kind, device)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[positions, ..., out]."""
        given = (inp, self.layer_norm_weight, self.weight, self.bias, self)
        if self.begin_fp8(inp):
            return Fp8NormedProduct.apply(*given, torch.is_grad_enabled(), is_first_microbatch)
        return NormedProduct.apply(*given)


class RMSNorm(_Layer):
    """As transformer_engine.pytorch.RMSNorm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.weight = _parameter(hidden_size, None, params_dtype, device)
        self.weight.sequence_parallel = bool(sequence_parallel)

    def forward(self, inputs: Tensor) -> Tensor:
        """The shape of the input."""
        return Norm.apply(inputs, self.weight)


class GroupedLinear(_Layer):
    """As transformer_engine.pytorch.GroupedLinear."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        bias: bool = True,
        return_bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1, "Megatron sends the tokens of experts"
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        for number in range(num_gemms):
            weight = _parameter(out_features, in_features, params_dtype, device)
            setattr(self, f"weight{number}", weight)
            if bias:
                setattr(self, f"bias{number}", _parameter(out_features, None, params_dtype, device))

    def forward(
        self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """[tokens of all experts, out]; with the biases where the caller adds them.

        m_splits: tokens of each expert.
        """
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        biases = [getattr(self, f"bias{n}") for n in range(self.num_gemms)] if self.use_bias else []
        given = (inp, self, list(m_splits))
        added = [] if self.return_bias else biases
        if self.begin_fp8(inp, self.num_gemms):
            own = (torch.is_grad_enabled(), is_first_microbatch)
            result = Fp8GroupedProduct.apply(*given, *own, *weights, *added)
        else:
            result = GroupedProduct.apply(*given, *weights, *added)
        return (result, biases) if self.use_bias and self.return_bias else result


def _parameter(
    rows: int, columns: int | None, dtype: torch.dtype | None, device: Any
) -> torch.nn.Parameter:
    shape = (rows,) if columns is None else (rows, columns)
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def _mark(weight: Tensor, *, dimension: int) -> None:
    """The marks by which Megatron knows a divided parameter."""
    weight.tensor_model_parallel = True
    weight.partition_dim = dimension
    weight.partition_stride = 1
