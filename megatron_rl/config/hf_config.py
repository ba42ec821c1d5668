"""Values of the config.json of a Hugging Face folder. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.errors import InputError


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the text model: those of `text_config` come first, where there is one.

    `architectures` stays the wrapper's. Embeddings are tied if either place says so. transformers 5
    reads the key beside text_config; earlier releases wrote it inside.
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


@dataclass(frozen=True)
class MlpSizes:
    """Layers behind attention: dense ones, and mixtures of experts. Units are rows of a gate."""

    dense_layers: int
    dense_units: int
    expert_layers: int
    experts: int
    chosen: int
    """Experts of a token."""
    units: int
    """Of one expert."""
    shared_units: int
    """Of experts that see every token, together."""

    def units_held(self) -> int:
        """Of all layers."""
        mixture = self.experts * self.units + self.shared_units
        return self.dense_layers * self.dense_units + self.expert_layers * mixture

    def units_used(self) -> int:
        """Of all layers, by one token."""
        mixture = self.chosen * self.units + self.shared_units
        return self.dense_layers * self.dense_units + self.expert_layers * mixture


def positions_of(values: Mapping[str, Any]) -> int | None:
    """Positions that a model has by its config.json, with scaling; None: it does not say."""
    positions = values.get("max_position_embeddings")
    if positions is None:
        return None
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    # Layers of several kinds have one each.
    kinds = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    return max(_stretched(one, values, positions) for one in kinds)


def _stretched(rope: Mapping[str, Any], values: Mapping[str, Any], positions: int) -> int:
    """max_position_embeddings with the scaling of one table."""
    kind, factor = rope.get("rope_type") or rope.get("type"), float(rope.get("factor") or 1.0)
    if kind in ("llama3", "longrope"):
        # The factor is in max_position_embeddings already.
        return positions
    if kind == "yarn":
        key = "original_max_position_embeddings"
        original = values.get(key) or rope.get(key) or positions
        # Qwen3's recipe has 4 x 32768 positions, and leaves max_position_embeddings at 40960.
        return int(original * factor) if rope.get("factor") else positions
    return int(positions * max(factor, 1.0))


def full_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of a model with a window, counted from 0, for which it does not hold."""
    kinds = values.get("layer_types") or ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def dense_count(values: Mapping[str, Any]) -> int:
    """First layers without experts of a model with experts, in a config.json. Raises InputError."""
    kinds = values.get("mlp_layer_types")
    if not kinds:
        # Only families that have such layers write this key, and its default is theirs.
        return values.get("first_k_dense_replace") or 0
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise InputError(
            f"mlp_layer_types={kinds} is not supported: dense layers must be the first ones"
        )
    engines = values.get("first_k_dense_replace")
    if engines not in (None, dense):
        raise InputError(
            f"mlp_layer_types has {dense} dense layers, but first_k_dense_replace={engines}, which "
            "SGLang reads: make them equal in config.json"
        )
    return dense


def mlp_sizes(values: Mapping[str, Any]) -> MlpSizes:
    """The sizes in a config.json. Raises KeyError for keys that a model of its kind needs."""
    layers = values["num_hidden_layers"]
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((values[key] for key in keys if values.get(key)), 0)
    if not experts:
        return MlpSizes(layers, values["intermediate_size"], 0, 0, 0, 0, 0)
    units = values.get("moe_intermediate_size") or values["intermediate_size"]
    dense = dense_count(values)
    return MlpSizes(
        dense_layers=dense,
        dense_units=values["intermediate_size"] if dense else 0,
        expert_layers=layers - dense,
        experts=experts,
        chosen=values["num_experts_per_tok"],
        units=units,
        shared_units=units * (values.get("n_shared_experts") or 0),
    )
