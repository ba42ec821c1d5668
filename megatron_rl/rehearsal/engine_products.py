"""TransformerEngine's products and norms without its kernels, in bfloat16 and float32, by shape.

Used by rehearsed ranks, through `engine_layers.py`; `engine_fp8_products.py` has those in FP8.
Written after transformer-engine 2.12.0, without userbuffers.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.backend.products import add_product
from megatron_rl.rehearsal import observed


class Layer(Protocol):
    """What a product asks of its layer."""

    tp_group: Any
    tp_size: int
    parallel_mode: str | None
    sequence_parallel: bool
    fuse_wgrad_accumulation: bool
    save_original_input: bool
    apply_bias: bool
    bias: Any

    @property
    def gathers(self) -> bool: ...

    @property
    def gathers_gradients(self) -> bool: ...

    def quantized(self, weight: Tensor, name: str, columns: bool, is_first: bool | None) -> Any: ...


class GroupedLayer(Protocol):
    """The same for the products of experts."""

    num_gemms: int
    fuse_wgrad_accumulation: bool
    save_original_input: bool

    def quantized(self, weight: Tensor, name: str, columns: bool, is_first: bool | None) -> Any: ...


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
    return gradient_of(weight, is_fused=True)


def gradient_of(weight: Tensor, *, is_fused: bool) -> Tensor:
    """What autograd gets; is_fused: the gradient was added to the weight's float32 sum."""
    if not is_fused:
        return torch.empty_like(weight)
    weight.grad_added_to_main_grad = True
    key = (weight.shape, weight.dtype)
    if key not in _unused_gradients:
        _unused_gradients[key] = torch.empty_like(weight)
    return _unused_gradients[key]


def reduce_result(result: Tensor, layer: Layer) -> Tensor:
    """The sum over tensor ranks that divide the weight's columns; else the result."""
    if layer.gathers_gradients:
        return scatter(result, layer.tp_group)
    if layer.parallel_mode == "row" and layer.tp_size > 1:
        dist.all_reduce(result, group=layer.tp_group)
    return result


def reduce_gradient(found: Tensor, layer: Layer) -> Tensor:
    """The sum over tensor ranks that divide the weight's rows; else the input's gradient."""
    if layer.gathers:
        return scatter(found, layer.tp_group, is_async=True)
    if layer.parallel_mode == "column" and layer.tp_size > 1:
        dist.all_reduce(found, group=layer.tp_group, async_op=True)
    return found


class Product(torch.autograd.Function):
    """A product with a weight whose rows or columns tensor ranks divide."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        whole = gather(rows, layer.tp_group) if layer.gathers else rows
        result = reduce_result(whole @ weight.t(), layer)
        ctx.layer, ctx.shape = layer, inputs.shape
        ctx.save_for_backward(rows, weight)
        return result.view(-1, *inputs.shape[1:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        layer = ctx.layer
        grad = grad.reshape(-1, grad.shape[-1])
        if layer.gathers_gradients:
            grad = gather(grad, layer.tp_group)
        found, of_weight = _both_gradients(layer, grad, rows, weight)
        return found.view(ctx.shape), of_weight, gradient_of_bias(layer), None


class NormedProduct(torch.autograd.Function):
    """The same after a norm, whose result is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
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
        return of_inputs, torch.empty_like(norm), of_weight, gradient_of_bias(ctx.layer), None


def _both_gradients(
    layer: Layer, grad: Tensor, rows: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the input, reduced over tensor ranks, and of the weight."""
    inputs = gather(rows, layer.tp_group, is_async=True) if layer.gathers else rows
    found = reduce_gradient(grad @ weight, layer)
    is_fused = layer.fuse_wgrad_accumulation
    return found, weight_gradient(weight, grad, inputs, is_fused=is_fused)


def gradient_of_bias(layer: Layer) -> Tensor | None:
    return torch.empty_like(layer.bias) if layer.apply_bias else None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        scales = inputs.new_empty(inputs.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(inputs, weight, scales)
        return torch.empty_like(inputs, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight, _ = ctx.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(weight)


class GroupedProduct(torch.autograd.Function):
    """The products of all experts, one kernel each way; rows are in the experts' order."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, layer: GroupedLayer, splits: list[int], *parameters: Tensor
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
        gradients = [gradient_of(weight, is_fused=is_fused) for weight in weights]
        gradients += [torch.empty_like(bias) for bias in biases]
        return torch.empty_like(inputs), None, None, *gradients
