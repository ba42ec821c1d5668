"""TransformerEngine's layers without its kernels: what they keep, compute and send, by shape.

Used by rehearsed ranks, where they stand in the package's place (`engine_stand_in.py`), so that
Megatron-Core's own classes for it are built and run. Written after transformer-engine 2.12.0 in
bfloat16 and float32; its FP8 and its userbuffers are not here. `tools.conformance` compares names
and arguments with the pinned package.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.backend.products import add_product
from megatron_rl.rehearsal import observed

_unused_gradients: dict[tuple[Any, ...], Tensor] = {}
"""What autograd hands on for weights whose gradient was added already, one of each size."""


def gather(shard: Tensor, group: dist.ProcessGroup, *, is_async: bool = False) -> Tensor:
    """All ranks' positions: [positions, ...]."""
    whole = shard.new_empty(len(shard) * group.size(), *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group, async_op=is_async)
    return whole


def scatter(whole: Tensor, group: dist.ProcessGroup, *, is_async: bool = False) -> Tensor:
    """This rank's positions of the sum over ranks."""
    shard = whole.new_empty(len(whole) // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(shard, whole.contiguous(), group=group, async_op=is_async)
    return shard


def weight_gradient(weight: Tensor, grad: Tensor, inputs: Tensor, *, is_fused: bool) -> Tensor:
    """grad^T @ inputs: added to the weight's float32 sum, or returned."""
    if not is_fused:
        return grad.t() @ inputs
    add_product(weight.main_grad, grad, inputs)
    weight.grad_added_to_main_grad = True
    return _unused_gradient(weight)


def _unused_gradient(weight: Tensor) -> Tensor:
    key = (weight.shape, weight.dtype)
    if key not in _unused_gradients:
        _unused_gradients[key] = torch.empty_like(weight)
    return _unused_gradients[key]


class _Linear(torch.autograd.Function):
    """A product with a weight whose rows or columns tensor ranks divide."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: "Linear"
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        whole = gather(rows, layer.tp_group) if layer.gathers else rows
        result = whole @ weight.t()
        if layer.parallel_mode == "row" and layer.tp_size > 1:
            if layer.sequence_parallel:
                result = scatter(result, layer.tp_group)
            else:
                dist.all_reduce(result, group=layer.tp_group)
        ctx.layer, ctx.shape = layer, inputs.shape
        ctx.save_for_backward(rows, weight)
        return result.view(-1, *inputs.shape[1:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        layer = ctx.layer
        grad = grad.reshape(-1, grad.shape[-1])
        if layer.parallel_mode == "row" and layer.tp_size > 1 and layer.sequence_parallel:
            grad = gather(grad, layer.tp_group)
        found, of_weight = _both_gradients(layer, grad, rows, weight)
        return found.view(ctx.shape), of_weight, _of_bias(layer), None


class _LayerNormLinear(torch.autograd.Function):
    """The same after a norm, whose result is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: "LayerNormLinear",
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        normed, scales = torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)
        whole = gather(normed, layer.tp_group) if layer.gathers else normed
        result = whole @ weight.t()
        ctx.layer, ctx.shape = layer, inputs.shape
        ctx.save_for_backward(rows, norm, normed, scales, weight)
        return result.view(-1, *inputs.shape[1:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, norm, normed, _, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        found, of_weight = _both_gradients(ctx.layer, grad, normed, weight)
        of_inputs = torch.empty_like(found).view(ctx.shape)
        return of_inputs, torch.empty_like(norm), of_weight, _of_bias(ctx.layer), None


def _both_gradients(
    layer: "Linear", grad: Tensor, rows: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the input, reduced over tensor ranks, and of the weight."""
    inputs = gather(rows, layer.tp_group, is_async=True) if layer.gathers else rows
    found = grad @ weight
    if layer.gathers:
        found = scatter(found, layer.tp_group, is_async=True)
    elif layer.parallel_mode == "column" and layer.tp_size > 1:
        dist.all_reduce(found, group=layer.tp_group, async_op=True)
    is_fused = layer.fuse_wgrad_accumulation
    return found, weight_gradient(weight, grad, inputs, is_fused=is_fused)


def _of_bias(layer: "Linear") -> Tensor | None:
    return torch.empty_like(layer.bias) if layer.apply_bias else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        scales = inputs.new_empty(inputs.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, scales)
        return torch.empty_like(inputs, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight, _ = ctx.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(weight)


class _GroupedLinear(torch.autograd.Function):
    """The products of all experts, one kernel each way; rows are in the experts' order."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, layer: "GroupedLinear", splits: list[int], *parameters: Tensor
    ) -> Tensor:
        """parameters: weights of all experts, then their biases, if the product adds them."""
        assert sum(splits) == len(inputs), f"{splits} rows of experts, but {len(inputs)} rows"
        weights = parameters[: layer.num_gemms]
        ctx.layer = layer
        ctx.save_for_backward(inputs, *parameters)
        observed.add_flops(2 * inputs.numel() * len(weights[0]))
        return inputs.new_empty(len(inputs), len(weights[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.layer.num_gemms], parameters[ctx.layer.num_gemms :]
        observed.add_flops(4 * inputs.numel() * len(weights[0]))
        is_fused = ctx.layer.fuse_wgrad_accumulation
        gradients = [_unused_gradient(w) if is_fused else torch.empty_like(w) for w in weights]
        if is_fused:
            for weight in weights:
                weight.grad_added_to_main_grad = True
        gradients += [torch.empty_like(bias) for bias in biases]
        return torch.empty_like(inputs), None, None, *gradients


class _Layer(torch.nn.Module):
    """What Megatron expects of every layer of the engine."""

    def set_extra_state(self, state: Any) -> None:
        """Does nothing, as extra state belongs to FP8."""

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
        self.use_bias, self.save_original_input = bias, False
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

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[positions, ..., out]; with the bias where the caller adds it."""
        result = _Linear.apply(inp, self.weight, self.bias, self)
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
        return _LayerNormLinear.apply(inp, self.layer_norm_weight, self.weight, self.bias, self)


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
        return _RMSNorm.apply(inputs, self.weight)


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
        if not self.use_bias:
            return _GroupedLinear.apply(inp, self, list(m_splits), *weights)
        biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)]
        if self.return_bias:
            return _GroupedLinear.apply(inp, self, list(m_splits), *weights), biases
        return _GroupedLinear.apply(inp, self, list(m_splits), *weights, *biases)


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
