"""Values of the config.json of a Hugging Face folder. Pure."""

from collections.abc import Mapping
from typing import Any


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the text model: those of `text_config`, where there is one, come first.

    The architecture stays that of the whole. Embeddings are tied if either place says so: earlier
    releases of transformers wrote it into text_config, transformers 5 reads it beside it.
    """
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(values)
    found = {**values, **inner}
    del found["text_config"]
    if values.get("architectures"):
        found["architectures"] = values["architectures"]
    if values.get("tie_word_embeddings"):
        found["tie_word_embeddings"] = True
    return found
