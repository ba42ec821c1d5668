"""The rotary embedding of a config.json, in both spellings. Pure functions of its values.

transformers 5 writes one table, `rope_parameters`; earlier releases and most files on the Hub have
`rope_theta` and `rope_scaling`. An engine may read the other one than the trainer.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.families import FAMILIES

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
"""Default of transformers 5."""
_TABLES = ("rope_parameters", "rope_scaling")
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Keys that earlier releases have beside the table."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields of another kind than `kind` are not used."""

    kind: str
    factor: float
    original_positions: int = 0
    """Of llama3 and yarn: positions before the stretching."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Of llama3."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    """Of yarn: turns between which frequencies are blended, at whole dimensions if truncated."""
    attention_factor: float = 1.0
    """Of yarn: cosines and sines are multiplied by it."""
    mscale_all_dim: float = 0.0
    """Of yarn in latent attention, which multiplies scores by (0.1 * it * ln(factor) + 1)^2."""


def read_rope(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The one meaning of both spellings, with `rope_theta` and `rope_type`.

    `folder` is for messages. Raises InputError for spellings that disagree, or tables in the table.
    """
    found: dict[str, tuple[Any, str]] = {}
    spellings = [(key, _table(values, key, folder)) for key in _TABLES if values.get(key)]
    beside = {key: values[key] for key in _BESIDE if values.get(key) is not None}
    for where, table in [*spellings, ("config.json", beside)]:
        for key, value in table.items():
            other, place = found.setdefault(key, (value, where))
            if other != value:
                raise InputError(
                    f"{folder}: config.json has two values of {key}: {other!r} ({place}) and "
                    f"{value!r} ({where}): leave the one with which the model was trained"
                )
    architecture = (values.get("architectures") or ["none"])[0]
    rope = {key: value for key, (value, _) in found.items()}
    family = FAMILIES.get(architecture)
    rope.setdefault(
        "rope_theta",
        family.defaults.get("rope_theta", _DEFAULT_THETA) if family else _DEFAULT_THETA,
    )
    rope.setdefault("rope_type", "default")
    if not isinstance(rope["rope_theta"], int | float):
        raise InputError(f"{folder}: rope_theta is {rope['rope_theta']!r}, not a number")
    return rope


def _table(values: dict[str, Any], key: str, folder: Path) -> dict[str, Any]:
    """One of the tables, its kind always as `rope_type`."""
    table = values[key]
    if not isinstance(table, dict):
        raise InputError(f"{folder}: {key} is {table!r:.80}, not a table")
    nested = sorted(name for name, value in table.items() if isinstance(value, dict))
    if nested:
        raise InputError(
            f"{folder}: {key} has a table for each kind of layer ({', '.join(nested)}): layers of "
            "different rotary embeddings are not supported"
        )
    kinds = {table[name] for name in ("rope_type", "type") if table.get(name) is not None}
    if len(kinds) > 1:
        raise InputError(f"{folder}: {key} has two kinds: {table['rope_type']!r} as rope_type and "
                         f"{table['type']!r} as type")  # fmt: skip
    given = {name: value for name, value in table.items() if name != "type" and value is not None}
    kind = next(iter(kinds), "default")
    # Qwen's positions in time, height and width are equal for text.
    return {**given, "rope_type": "default" if kind == "mrope" else kind}


def in_both_spellings(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values with the spelling that they lack, so that every engine finds one. Raises
    InputError as `read_rope`."""
    if not any(key in values for key in (*_TABLES, "rope_theta")):
        return values
    rope = read_rope(values, folder)
    scaling = {key: value for key, value in rope.items() if key not in _BESIDE}
    found = dict(values)
    found.setdefault("rope_parameters", rope)
    found.setdefault("rope_theta", rope["rope_theta"])
    if rope["rope_type"] != "default":
        found.setdefault("rope_scaling", scaling)
    return found


def rope_scaling(rope: dict[str, Any], values: dict[str, Any], folder: Path) -> RopeScaling | None:
    """Scaling from what `read_rope` returns, and from the other values of config.json."""
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise InputError(
            f"{folder}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    # As transformers 5: a key beside the table comes first, and the context length is the last.
    positions = values.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", values["max_position_embeddings"]
    )
    if kind == "yarn":
        factor = float(rope.get("factor") or values["max_position_embeddings"] / positions)
        return RopeScaling(
            kind,
            factor,
            int(positions),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            is_truncated=bool(rope.get("truncate", True)),
            attention_factor=_attention_factor(rope, factor),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
        )
    return RopeScaling(
        kind,
        float(rope["factor"]),
        int(positions),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
    )


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """What YaRN multiplies cosines and sines by. Source: arXiv 2309.00071, equation 22."""
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    # DeepSeek's two keys: the second one takes back what the first adds.
    return scale(over) / scale(under) if over and under else scale(1)
