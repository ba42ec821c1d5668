"""Kinds of attention among a model's layers, in its config.json. Pure functions of its values."""

from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.hf_config import full_layers
from megatron_rl.weights.layout.families.family import Family


def window_fields(values: dict[str, Any], family: Family, folder: Path) -> dict[str, Any]:
    """The fields of ModelShape that say which positions a layer sees.

    Raises InputError for windows that the family does not have.
    """
    kinds, window = values.get("layer_types"), values.get("sliding_window")
    if not family.mixes_windows:
        # transformers applies Qwen's layer_types per layer; Mistral's window holds for all layers.
        if kinds and "full_attention" in kinds and len(set(kinds)) > 1:
            raise InputError(
                f"{folder}: layers of different attention (layer_types) are not supported"
            )
        # transformers' Ministral 3 reads the key of a window alone; SGLang's has none.
        key = "sliding_window" if family.scales_queries else "use_sliding_window"
        if values.get(key) and not family.has_window:
            raise InputError(f"{folder}: {key} is not supported for {family.architecture}")
        return {"sliding_window": window if family.has_window else None}
    layers = values["num_hidden_layers"]
    if not values.get("use_sliding_window", True):
        window = None
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    if kinds is None and window is None:
        return {"sliding_window": None}
    if not kinds or len(kinds) != layers or not known.issuperset(kinds):
        raise InputError(
            f"{folder}: layer_types={kinds} is not supported with a sliding window of {window}: "
            f"expected {' or '.join(sorted(known))} for each of {layers} layers"
        )
    full = full_layers(values)
    if len(full) == layers:
        return {"sliding_window": None}
    return {"sliding_window": window, "full_layers": full}


def unrotated_layers(values: dict[str, Any], family: Family, folder: Path) -> tuple[int, ...]:
    """As `ModelShape.unrotated_layers`. Raises InputError for a list that is too short."""
    if not family.rotates_some:
        return ()
    layers, given = values["num_hidden_layers"], values.get("no_rope_layers")
    if given is None:
        every = values["no_rope_layer_interval"]
        return tuple(range(every - 1, layers, every))
    if len(given) < layers:
        raise InputError(
            f"{folder}: no_rope_layers={given} names {len(given)} of {layers} layers: expected 1 "
            "(rotary embeddings) or 0 for each"
        )
    return tuple(layer for layer in range(layers) if not given[layer])
