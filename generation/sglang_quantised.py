"""The parameters of an SGLang engine that quantises: slices come in, codes and scales are stored.

Runs inside every rank of an SGLang server. Names and shapes are those of SGLang 0.5.23.

A slice needs the parameter as it was before SGLang quantised it. So each quantised layer gets a
*staging layer* when its first slice comes: SGLang's `create_weights` makes its parameters. When all
slices of the layer have been copied, SGLang's `process_weights_after_loading` quantises the staging
layer, as it does for a layer that was loaded from a folder. The results are copied into the live
tensors, whose addresses CUDA graphs hold. Then the staging layer is freed.

| method of the layer | stored, for a weight of [rows, columns] |
|---|---|
| Fp8LinearMethod, GPU with FP8 (sm89 and later) | `weight` [columns, rows], codes of rows transposed; `weight_scale` [1, rows] |
| Fp8LinearMethod, GPU without FP8 (sm80 to sm86: Marlin) | `weight` int32, repacked; `weight_scale` permuted; `workspace` |
| Fp8LinearMethod, elsewhere | `weight` [columns, rows]; `weight_scale`, one number |
| Fp8MoEMethod, Triton's runner | `w13_weight`, `w2_weight` of their shapes; `w13_weight_scale`, `w2_weight_scale` [experts] |

Other methods are refused: their checkpoints hold codes, or their layout has not been read.
"""  # noqa: E501

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_rl.weights.exchange.parcels import StagedParameters
from megatron_rl.weights.layout.slices import shown

_PLAIN = (
    "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod",
)  # fmt: skip
_OF_EXPERTS = ("UnquantizedFusedMoEMethod", "Fp8MoEMethod")
_OF_KV_CACHE = "Fp8KVCacheMethod"
"""Its two parameters scale the KV cache. No tensor of the policy belongs to them."""


def check_runners(model: Module) -> None:
    """Raise ValueError unless all experts lie as slices say, which Triton's runner needs.

    Other runners want up before gate, or permute rows (SGLang 0.5.23, fused_moe_triton/layer.py).
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ not in _OF_EXPERTS:
            continue
        runner = method.get_moe_runner_backend(module)
        if runner is None or not runner.is_triton():
            given = "none" if runner is None else runner.value
            raise ValueError(
                f"{name}: experts of SGLang's runner {given!r} lie in another order than weight "
                "syncs write. Only 'triton' is allowed: leave out "
                "generator.extra_args.moe-runner-backend and SGLANG_* of generator.env"
            )


def is_quantised(model: Module) -> bool:
    """Whether SGLang stores any weight of the model otherwise than it was loaded."""
    return any(_is_quantising(module) for module in model.modules())


def _is_quantising(module: Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is not None and type(method).__name__ not in (*_PLAIN, _OF_KV_CACHE)


@dataclass
class _Layer:
    """A quantised layer, and what has come of its weights."""

    name: str
    live: Module
    planned: dict[str, Tensor]
    """Local name -> a tensor of the shape before quantisation, without memory."""
    missing: dict[str, int] = field(default_factory=dict)
    """Local name -> elements that the transfer still has to bring."""
    staged: Module | None = None

    def full(self, local: str) -> str:
        """Name in the model of one of its parameters."""
        return f"{self.name}.{local}"


class QuantisingParameters(StagedParameters):
    """All parameters of a model, for slices in its dtype; see the module's table."""

    def __init__(self, model: Module) -> None:
        """Raises ValueError if a layer's method cannot be filled by slices."""
        super().__init__((name, held.data) for name, held in model.named_parameters())
        self._layers: list[_Layer] = []
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is None or type(method).__name__ in _PLAIN:
                continue
            for local, _ in module.named_parameters(recurse=False):
                self.pop(f"{name}.{local}", None)
            if _is_quantising(module):
                _check_method(name, method)
                planned = _parameters_of(_before_loading(module, torch.device("meta")))
                self._layers.append(_Layer(name, module, planned))
                _keep_codes(method)
        self._device = next(iter(self.values())).device
        self._places = {layer.full(p): (layer, p) for layer in self._layers for p in layer.planned}
        self.update((name, layer.planned[p]) for name, (layer, p) in self._places.items())
        self._is_open = False
        self.staged_bytes = 0
        """Memory of all staging layers at present."""
        self.peak_bytes = 0
        """The most that `staged_bytes` has been since `begin`."""

    def begin(self, elements: Mapping[str, int]) -> None:
        """See `StagedParameters`."""
        self.drop()
        for layer in self._layers:
            layer.missing = {local: elements.get(layer.full(local), 0) for local in layer.planned}
        self.peak_bytes = 0
        self._is_open = True

    def __getitem__(self, name: str) -> Tensor:
        """In a transfer the tensor into which slices of the parameter are copied."""
        if name not in self._places or not self._is_open:
            return super().__getitem__(name)
        layer, local = self._places[name]
        if layer.staged is None:
            layer.staged = self._stage(layer)
        return _parameters_of(layer.staged)[local]

    @torch.no_grad()
    def arrived(self, name: str, elements: int) -> None:
        """Count elements; quantise the layer that they complete.

        Raises RuntimeError for more elements than `begin` announced, and where SGLang stores other
        tensors than the live ones.
        """
        if name not in self._places:
            return
        layer, local = self._places[name]
        layer.missing[local] -= elements
        if layer.missing[local] < 0:
            raise RuntimeError(f"{name}: {-layer.missing[local]} more elements came than announced")
        if layer.staged is not None and not any(layer.missing.values()):
            staged_bytes = _bytes_of(layer.staged)
            _quantise(layer.staged)
            _copy_in_place(layer.staged, layer.live, layer.name)
            layer.staged = None
            self.staged_bytes -= staged_bytes

    def finish(self) -> int:
        """See `StagedParameters`."""
        self.drop()
        lacking = [name for name, (layer, local) in self._places.items() if layer.missing[local]]
        if lacking:
            raise RuntimeError(f"{len(lacking)} quantised parameters lack slices: {shown(lacking)}")
        return self.peak_bytes

    def drop(self) -> None:
        """See `StagedParameters`."""
        for layer in self._layers:
            layer.staged = None
        self.staged_bytes = 0
        self._is_open = False

    def _stage(self, layer: _Layer) -> Module:
        staged = _before_loading(layer.live, self._device)
        for local, parameter in _parameters_of(staged).items():
            if layer.missing[local] != parameter.numel():
                # No slice covers padding. SGLang's loaders leave zeros there.
                parameter.zero_()
        self.staged_bytes += _bytes_of(staged)
        self.peak_bytes = max(self.peak_bytes, self.staged_bytes)
        return staged


def _check_method(name: str, method: Any) -> None:
    """Raise ValueError unless SGLang quantises the layer's bf16 weights at loading."""
    kind = type(method).__name__
    if kind not in ("Fp8LinearMethod", "Fp8MoEMethod"):
        raise ValueError(
            f"{name}: a layer of method {kind} cannot be filled by slices; Fp8LinearMethod and "
            'Fp8MoEMethod can. Set generator.quantization="fp8" or ""'
        )
    if method.block_quant or method.quant_config.is_checkpoint_fp8_serialized:
        raise ValueError(
            f"{name}: the engine's model folder holds codes (block scales: {method.block_quant}). "
            "Slices are quantised only as SGLang quantises a folder without codes: give it one"
        )


def _keep_codes(method: Any) -> None:
    """Let the end of SGLang's weight updates leave the layer alone.

    `end_weight_update` calls this for every layer: it would quantise codes as if they were weights.
    """
    method.process_weights_after_loading = lambda layer: None


def _before_loading(live: Module, device: torch.device) -> Module:
    """The layer as SGLang created it, with new parameters; all else is shared."""
    made = copy.copy(live)
    made._parameters, made._buffers = {}, dict(live._buffers)
    with device:
        live.quant_method.create_weights(made, **_sizes_of(live))
        bias = live._parameters.get("bias")
        if bias is not None:
            made.register_parameter(
                "bias", Parameter(torch.empty(bias.shape, dtype=live.params_dtype))
            )
    return made


def _sizes_of(layer: Any) -> dict[str, Any]:
    """Arguments of `create_weights` with which SGLang created the layer."""
    common = {"params_dtype": layer.params_dtype, "weight_loader": layer.weight_loader}
    if type(layer.quant_method).__name__ == "Fp8MoEMethod":
        return common | {
            "num_experts": layer.num_local_experts,
            "hidden_size": layer.hidden_size,
            "intermediate_size_per_partition": layer.intermediate_size_per_partition,
            "with_bias": layer.with_bias,
        }
    return common | {
        "input_size_per_partition": layer.input_size_per_partition,
        "output_partition_sizes": layer.logical_widths,
        "input_size": layer.input_size,
        "output_size": layer.output_size,
    }


def _quantise(staged: Module) -> None:
    """Do what SGLang does once it has loaded the layer from a folder."""
    method = staged.quant_method
    # The method itself was replaced by `_keep_codes`.
    type(method).process_weights_after_loading(method, staged)


def _copy_in_place(staged: Module, live: Module, name: str) -> None:
    """Copy all tensors of the staging layer into those of the live one.

    Raises RuntimeError if these differ in number, shape or dtype.
    """
    new, old = _tensors_of(staged), _tensors_of(live)
    if new.keys() != old.keys():
        raise RuntimeError(f"{name}: SGLang stores {sorted(new)}, and stored {sorted(old)}")
    for local, tensor in new.items():
        held = old[local]
        if (tensor.shape, tensor.dtype) != (held.shape, held.dtype):
            raise RuntimeError(
                f"{name}.{local}: SGLang stores {tensor.dtype} {list(tensor.shape)}, and stored "
                f"{held.dtype} {list(held.shape)}"
            )
        if tensor.data_ptr() != held.data_ptr():
            held.copy_(tensor)


def _parameters_of(layer: Module) -> dict[str, Tensor]:
    """Parameters that slices fill; those for scales are none of them."""
    return {
        local: parameter.data
        for local, parameter in layer.named_parameters(recurse=False)
        if "scale" not in local
    }


def _tensors_of(layer: Module) -> dict[str, Tensor]:
    """Everything of the layer that its kernels may read."""
    held = {**layer._parameters, **layer._buffers, **vars(layer)}
    return {local: value for local, value in held.items() if isinstance(value, Tensor)}


def _bytes_of(layer: Module) -> int:
    return sum(parameter.nbytes for parameter in _parameters_of(layer).values())
