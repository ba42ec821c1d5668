"""TransformerEngine's products in FP8 without its kernels, by shape.

Used by rehearsed ranks, through `engine_layers.py`. Written after transformer-engine 2.12.0
(module/linear.py, layernorm_linear.py, grouped_linear.py). A product keeps the codes of its input
for the gradient of its weight: transposed ones, or those by rows where tensor ranks gather them
again and have one scale. Weights have codes of both kinds, from microbatch to microbatch.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_rl.rehearsal import observed
from megatron_rl.rehearsal.engine_codes import Codes, Quantizer, gather_codes
from megatron_rl.rehearsal.engine_fp8 import (
    DelayedScaling,
    FP8GlobalStateManager,
    Recipe,
    activation_recompute_forward,
)
from megatron_rl.rehearsal.engine_products import (
    GroupedLayer,
    Layer,
    gather,
    gradient_of,
    gradient_of_bias,
    reduce_gradient,
    reduce_result,
)


def check_sizes(*tensors: Tensor) -> None:
    """Raise AssertionError for sizes that FP8 products do not take, as TransformerEngine does."""
    for tensor in tensors:
        rows, width = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
        assert rows % 8 == 0 and width % 16 == 0, (
            f"FP8 products need a multiple of 8 rows and of 16 columns, not {rows} x {width}"
        )


class Fp8Product(torch.autograd.Function):
    """As `Product`."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        has_gradients: bool,
        is_first_microbatch: bool,
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        check_sizes(rows, weight)
        ctx.fp8 = fp8 = _Passes(layer, FP8GlobalStateManager.get_fp8_recipe())
        codes = fp8.inputs.quantize(
            rows,
            rows=True,
            columns=has_gradients and not layer.save_original_input and not fp8.sends_rows,
        )
        with_columns = has_gradients and inputs.requires_grad
        with_columns |= activation_recompute_forward.keeps_columns
        kept = layer.quantized(weight, "weight", with_columns, is_first_microbatch)
        result = reduce_result(fp8.multiply(codes, weight), layer)
        ctx.shape = inputs.shape
        fp8.note_first(has_gradients)
        saved = [rows] if layer.save_original_input else fp8.kept(codes).tensors()
        ctx.save_for_backward(weight, *kept.tensors(), *saved)
        return result.view(-1, *inputs.shape[1:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        fp8, saved = ctx.fp8, tensors[4:]
        grads = fp8.quantize_gradient(grad.reshape(-1, grad.shape[-1]))
        if len(saved) == 1:
            # By rows too, as codes with one scale are transposed on the way.
            codes = fp8.inputs.quantize(
                saved[0], rows=not fp8.inputs.has_blocks, columns=not fp8.sends_rows
            )
        else:
            codes = Codes(*saved)
        found, of_weight = fp8.gradients(grads, codes, weight)
        fp8.end()
        return found.view(ctx.shape), of_weight, gradient_of_bias(fp8.layer), None, None, None


class Fp8NormedProduct(torch.autograd.Function):
    """As `NormedProduct`: the norm's result is kept as codes alone."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        has_gradients: bool,
        is_first_microbatch: bool,
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        check_sizes(rows, weight)
        scales = rows.new_empty(len(rows), dtype=torch.float32)
        ctx.fp8 = fp8 = _Passes(layer, FP8GlobalStateManager.get_fp8_recipe())
        columns = has_gradients and not fp8.sends_rows
        # Under delayed scaling the norm's kernel writes codes; its input stands for their sizes.
        normed = rows if fp8.is_delayed else torch.empty_like(rows)
        codes = fp8.inputs.quantize(normed, rows=True, columns=columns)
        del normed
        kept = layer.quantized(weight, "weight", has_gradients, is_first_microbatch)
        result = fp8.multiply(codes, weight)
        ctx.shape = inputs.shape
        fp8.note_first(has_gradients)
        saved = fp8.kept(codes).tensors()
        ctx.save_for_backward(weight, rows, norm, scales, *kept.tensors(), *saved)
        return result.view(-1, *inputs.shape[1:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, _, norm, _, *tensors = ctx.saved_tensors
        fp8 = ctx.fp8
        grads = fp8.quantize_gradient(grad.reshape(-1, grad.shape[-1]))
        found, of_weight = fp8.gradients(grads, Codes(*tensors[4:]), weight)
        of_inputs = torch.empty_like(found).view(ctx.shape)
        fp8.end()
        of_bias = gradient_of_bias(fp8.layer)
        return of_inputs, torch.empty_like(norm), of_weight, of_bias, None, None, None


class Fp8GroupedProduct(torch.autograd.Function):
    """As `GroupedProduct`; each expert has its own scales."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        layer: GroupedLayer,
        splits: list[int],
        has_gradients: bool,
        is_first_microbatch: bool,
        *parameters: Tensor,
    ) -> Tensor:
        """parameters: weights of all experts, then their biases, if the product adds them."""
        assert sum(splits) == len(inputs), f"{splits} rows of experts, but {len(inputs)} rows"
        weights = parameters[: layer.num_gemms]
        ctx.quantizer = Quantizer(FP8GlobalStateManager.get_fp8_recipe())
        ctx.layer, ctx.splits = layer, splits
        keeps_input = layer.save_original_input
        codes = ctx.quantizer.quantize(
            inputs, rows=True, columns=has_gradients and not keeps_input, splits=splits
        )
        with_columns = has_gradients and inputs.requires_grad
        with_columns |= activation_recompute_forward.keeps_columns
        for number, weight in enumerate(weights):
            layer.quantized(weight, f"weight{number}", with_columns, is_first_microbatch)
        observed.add_flops(2 * inputs.numel() * len(weights[0]))
        result = inputs.new_empty(len(inputs), len(weights[0]))
        ctx.shape = inputs.shape
        ctx.reduces = has_gradients and FP8GlobalStateManager.is_first_fp8_module()
        saved = [inputs] if keeps_input else codes.without_rows().tensors()
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *parameters)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved, parameters = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        weights, biases = parameters[: ctx.layer.num_gemms], parameters[ctx.layer.num_gemms :]
        grads = ctx.quantizer.quantize(grad, rows=True, columns=True, splits=ctx.splits)
        found = grad.new_empty(ctx.shape)
        if len(saved) == 1:
            codes = ctx.quantizer.quantize(
                saved[0], rows=not ctx.quantizer.has_blocks, columns=True, splits=ctx.splits
            )
            del codes
        observed.add_flops(4 * found.numel() * len(weights[0]))
        is_fused = ctx.layer.fuse_wgrad_accumulation
        gradients = [gradient_of(weight, is_fused=is_fused) for weight in weights]
        gradients += [torch.empty_like(bias) for bias in biases]
        del grads
        if ctx.reduces:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return found, None, None, None, None, *gradients


class _Passes:
    """Both passes of a product that tensor ranks may divide."""

    def __init__(self, layer: Layer, recipe: Recipe) -> None:
        self.layer, self.reduces = layer, False
        self.is_delayed = isinstance(recipe, DelayedScaling)
        of_row = layer.tp_group if layer.gathers_gradients else None
        self.inputs = Quantizer(recipe, group=layer.tp_group if layer.gathers else None)
        self._gradients = Quantizer(recipe, group=of_row)
        # Transposed codes of several ranks do not lie next to each other.
        self.sends_rows = layer.gathers and not self.inputs.has_blocks

    def note_first(self, has_gradients: bool) -> None:
        """Whether the backward pass of this product ends that of a context."""
        if not has_gradients:
            return
        state = FP8GlobalStateManager.state
        self.reduces = FP8GlobalStateManager.is_first_fp8_module()
        if activation_recompute_forward.is_second:
            state.is_first = self.reduces

    def end(self) -> None:
        """After the backward pass."""
        if self.reduces:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    def kept(self, codes: Codes) -> Codes:
        """What of the input stays for the backward pass."""
        return codes.without_columns() if self.sends_rows else codes.without_rows()

    def multiply(self, codes: Codes, weight: Tensor) -> Tensor:
        """inputs @ weight^T: [positions of all tensor ranks, out]."""
        if self.layer.gathers:
            assert codes.rows is not None and self.inputs.can_gather(codes.rows), (
                "tensor ranks exchange whole blocks alone"
            )
            codes, _ = gather_codes(
                codes, self.layer.tp_group, self.inputs, rows=True, columns=False
            )
        assert codes.rows is not None
        return _product(weight, len(codes.rows), *weight.shape)

    def quantize_gradient(self, grad: Tensor) -> Codes:
        """Of the product's result, for both of its factors."""
        if not self.layer.gathers_gradients:
            return self._gradients.quantize(grad, rows=True, columns=True)
        group = self.layer.tp_group
        if not self._gradients.can_gather(grad):
            return self._gradients.quantize(gather(grad, group), rows=True, columns=True)
        columns = self._gradients.has_blocks
        codes = self._gradients.quantize(grad, rows=True, columns=columns)
        return gather_codes(codes, group, self._gradients, rows=True, columns=True)[0]

    def gradients(self, grads: Codes, codes: Codes, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Of the input, reduced over tensor ranks, and of the weight."""
        layer, pending = self.layer, []
        if layer.gathers:
            codes, pending = gather_codes(
                codes,
                layer.tp_group,
                self.inputs,
                rows=self.sends_rows,
                columns=not self.sends_rows,
                is_async=True,
            )
        assert grads.rows is not None
        found = _product(weight, len(grads.rows), *reversed(weight.shape))
        found = reduce_gradient(found, layer)
        pending.clear()
        codes.add_columns()
        observed.add_flops(2 * len(grads.rows) * weight.numel())
        return found, gradient_of(weight, is_fused=layer.fuse_wgrad_accumulation)


def _product(weight: Tensor, rows: int, out: int, inner: int) -> Tensor:
    """[rows, out] in the weight's dtype."""
    observed.add_flops(2 * rows * out * inner)
    return weight.new_zeros(rows, out)
