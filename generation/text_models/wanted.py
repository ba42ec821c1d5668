"""SGLang's class of a text model, under the architecture of the folder's config.json."""

import importlib
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from generation.text_models import FOLDER_VARIABLE
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.fused_files import each_expert
from megatron_rl.weights.layout.rope import read_rope
from megatron_rl.weights.layout.shape import ModelShape, read_shape

_ROTATIONS = ("mrope_section", "mrope_interleaved")
"""These keys say which positions rotate which dimensions. All positions of text are equal."""


class Unrotated(nn.Module):
    """In place of a rotary embedding: queries and keys stay as they are."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """As SGLang calls its own."""
        return query, key


def text_classes(folder: Path) -> list[type]:
    """Classes that SGLang finds for the model in a folder: the text model alone.

    Embeddings are tied as the trainer reads it: the defaults of transformers differ between a
    wrapper's configuration and the text model's.
    """
    shape = read_shape(folder)
    values = json.loads((folder / "config.json").read_text())
    wrapper = FAMILIES[shape.architecture].wrapper
    table = FAMILIES[shape.architecture].of_text(values)
    module = importlib.import_module(f"sglang.srt.models.{table.engine_module}")
    kind = table.engine_class or table.architecture
    base = getattr(module, kind)

    def start(self: Any, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        text = config.text_config if wrapper else config
        text.tie_word_embeddings = shape.is_tied
        if shape.rotary_dim:
            # transformers keeps the share in rope_parameters alone; half a dimension for rounding.
            text.partial_rotary_factor = (shape.rotary_dim + 0.5) / shape.head_dim
        if shape.stretches_full_layers:
            # SGLang 0.5.23 has one table, and stretches the angles of layers without a window.
            text.rope_scaling = text.rope_parameters = read_rope(values, folder)
        if shape.rope_scaling and shape.rope_scaling.kind == "longrope":
            # SGLang's own does not know attention_factor.
            text.rope_parameters["short_mscale"] = shape.rope_scaling.attention_factor
        for key in _ROTATIONS:
            text.rope_parameters.pop(key, None)
        if shape.scales_queries:
            # SGLang 0.5.23 looks for the key here, and takes 16384 otherwise.
            key = "original_max_position_embeddings"
            setattr(text, key, text.rope_parameters[key])
        base.__init__(self, text, quant_config=quant_config, prefix=prefix)
        set_layer_kinds(self.model.layers, shape)

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        if wrapper is None:
            return base.load_weights(self, weights)
        named = ((wrapper.text_name(name), tensor) for name, tensor in weights)
        text = ((name, tensor) for name, tensor in named if name)
        if table.fuses_experts:
            # SGLang's class of the text model reads experts one by one.
            parts = (each_expert(name, tensor, shape) for name, tensor in text)
            text = itertools.chain.from_iterable(parts)
        return base.load_weights(self, text)

    def locate_experts(cls: type, config: Any) -> Any:
        return base.get_model_config_for_expert_location(config.text_config)

    changes: dict[str, Any] = {"__init__": start, "load_weights": load_weights}
    if wrapper is not None and table.experts is not None:
        changes["get_model_config_for_expert_location"] = classmethod(locate_experts)
    if shape.sliding_window:
        # As SGLang, and its attention: positions before a query's own.
        window = shape.sliding_window - 1
        changes["get_attention_sliding_window_size"] = lambda self: window
    # SGLang's configuration of OLMo 3 changes the architecture.
    names = {shape.architecture, kind} if wrapper is None else {shape.architecture}
    return [type(name, (base,), changes) for name in names]


def set_layer_kinds(layers: Iterable[Any], shape: ModelShape) -> None:
    """Give each layer its window, and take rotary embeddings from those without."""
    for number, layer in enumerate(layers):
        window = shape.window_of(number)
        if window:
            layer.self_attn.attn.sliding_window_size = window - 1
        if number in shape.unrotated_layers:
            layer.self_attn.rotary_emb = Unrotated()


EntryClass = text_classes(Path(os.environ[FOLDER_VARIABLE]))
