"""SGLang's class of the text model, under the name of the wrapper that the environment names."""

import importlib
import os
from collections.abc import Iterable
from typing import Any

from generation.text_models import MODEL_VARIABLE, TIED_VARIABLE
from megatron_rl.weights.layout.families import FAMILIES

_ROTATIONS = ("mrope_section", "mrope_interleaved")
"""These keys say which positions rotate which dimensions. All positions of text are equal."""


def text_class(architecture: str, *, is_tied: bool) -> type:
    """A class that SGLang finds under `architecture`, and that loads the text model alone.

    is_tied: as config.json says to the trainer. The defaults of transformers differ between the
    wrapper's configuration and the text model's.
    """
    family = FAMILIES[architecture]
    wrapper = family.wrapper
    assert wrapper is not None, f"{architecture} is a text model alone"
    module = importlib.import_module(f"sglang.srt.models.{family.engine_module}")
    base = getattr(module, wrapper.engine_class)

    def start(self: Any, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        text = config.text_config
        text.tie_word_embeddings = is_tied
        for key in _ROTATIONS:
            text.rope_parameters.pop(key, None)
        base.__init__(self, text, quant_config=quant_config, prefix=prefix)

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        named = ((wrapper.text_name(name), tensor) for name, tensor in weights)
        return base.load_weights(self, ((name, tensor) for name, tensor in named if name))

    return type(architecture, (base,), {"__init__": start, "load_weights": load_weights})


EntryClass = text_class(os.environ[MODEL_VARIABLE], is_tied=os.environ[TIED_VARIABLE] == "1")
