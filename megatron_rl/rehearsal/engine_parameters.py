"""Parameters of an engine rank at real size, without SGLang: those that the plan's slices cover.

With generator.quantization the product's `QuantisingParameters` fills stand-ins for SGLang's
layers: codes of one byte and a scale for each row. SGLang's own kernels are not rehearsed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import _disable_current_modes

from generation.sglang_quantised import QuantisingParameters
from megatron_rl.rehearsal.device import DEVICE
from megatron_rl.weights.layout.slices import Slice

QUANTISED = re.compile(r"(_proj(_with_mqa)?|\.experts)$")
"""Names of layers that SGLang 0.5.23 quantises."""
_ASKED = "weight_loader input_size_per_partition logical_widths input_size output_size".split()
"""What `QuantisingParameters` asks of a layer for `create_weights`, which knows the sizes here."""


def parameters_of(
    slices: Iterable[Slice], dtype: torch.dtype, *, quantises: bool
) -> dict[str, Tensor]:
    """By name, as `EngineRank` asks for them at each transfer."""
    layers: dict[str, dict[str, tuple[int, int]]] = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    for part in slices:
        path, _, local = part.local.rpartition(".")
        rows, columns = part.local_row + part.rows, part.local_column + part.columns
        held = layers[path][local]
        layers[path][local] = max(held[0], rows), max(held[1], columns)
    model = Module()
    for path, sizes in layers.items():
        # A name with dots, which stands for a path of modules.
        model._modules[path] = layer = Module()
        vars(layer).update(dict.fromkeys(_ASKED), params_dtype=dtype)
        method = Fp8LinearMethod(sizes)
        method.create_weights(layer, dtype)
        # SGLang does not quantise the attention of gpt-oss.
        has_sinks = "sinks" in layers.get(path.rpartition(".")[0], {})
        if quantises and QUANTISED.search(path) and not has_sinks:
            layer.quant_method = method
            method.process_weights_after_loading(layer)
    if not quantises:
        return {name: each.data for name, each in model.named_parameters()}
    # Not traced: what it plans has no memory on a real device either.
    with _disable_current_modes():
        return QuantisingParameters(model)


@dataclass
class Fp8LinearMethod:
    """By SGLang's name, for linear layers and for experts: makes, then quantises their weights."""

    sizes: dict[str, tuple[int, int]]
    block_quant = False
    quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=False)

    def create_weights(self, layer: Module, params_dtype: torch.dtype, **_: object) -> None:
        """As SGLang, before it loads weights."""
        for local, size in self.sizes.items():
            _put(layer, local, torch.empty(size, dtype=params_dtype, device=DEVICE))

    def process_weights_after_loading(self, layer: Module) -> None:
        """As SGLang; biases stay."""
        for local, held in [*layer.named_parameters(recurse=False)]:
            if not local.endswith("bias"):
                _put(layer, local, held.new_empty(held.shape, dtype=torch.float8_e4m3fn))
                _put(layer, f"{local}_scale", held.new_empty(len(held), dtype=torch.float32))


def _put(layer: Module, local: str, held: Tensor) -> None:
    layer.register_parameter(local, Parameter(held, requires_grad=False))
