"""Parameters of a rank's model under the names of `trainer_layout.py`. Used by trainer ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ENGINE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""TransformerEngine puts a norm into the linear layer that follows it; its name -> ours."""
LATENT_NAMES = {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""The same in layers with latent attention, where two linear layers follow the first norm."""
# Its grouped experts are one module with a weight for each expert.
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_CORRECTION = ".router.expert_bias"


def named_parameters(model: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """The parameters of a rank's chunks under the names of `layer_entries`.

    Strips the wrappers' prefixes, translates TransformerEngine's names, and numbers layers
    across chunks.
    """
    return _named(model, lambda chunk: chunk.named_parameters())


def named_tensors(model: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """As `named_parameters`, and the buffers that folders have: corrections of routers."""

    def of_chunk(chunk: torch.nn.Module) -> Iterable[tuple[str, Tensor]]:
        yield from chunk.named_parameters()
        yield from (item for item in chunk.named_buffers() if item[0].endswith(_CORRECTION))

    return _named(model, of_chunk)


def _named(
    model: Sequence[torch.nn.Module],
    tensors: Callable[[torch.nn.Module], Iterable[tuple[str, Tensor]]],
) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    first = 0
    for chunk in model:
        # Megatron counts the layers of each chunk from 0; a chunk may also hold none.
        layers = {0}
        for name, tensor in tensors(chunk):
            name = local_name(name)
            if found := _LAYER.match(name):
                layers.add(int(found[1]) + 1)
                name = f"decoder.layers.{first + int(found[1])}.{name[found.end() :]}"
            assert name not in named, f"two parameters are called {name}"
            named[name] = tensor
        first += max(layers)
    return named


def local_name(name: str) -> str:
    """The name in `layer_entries` of a chunk's parameter `name`, without the layer."""
    # One prefix each of data parallelism and of the bf16 wrapper, where there is one.
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for engine_name, ours in (ENGINE_NAMES | LATENT_NAMES).items():
        if name.endswith(engine_name):
            return name.removesuffix(engine_name) + ours
    return _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\3.\1.\2", name)
