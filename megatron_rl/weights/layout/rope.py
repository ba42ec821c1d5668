"""The rotary embedding of a config.json, in both spellings. Pure functions of its values.

transformers 5 writes one table, `rope_parameters`; earlier releases and most files on the Hub have
`rope_theta` and `rope_scaling`. An engine may read the other one than the trainer.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Family

_DEFAULT_THETA = 10000.0
"""Default of transformers 5."""
_TABLES = ("rope_parameters", "rope_scaling")
_KINDS = ("full_attention", "sliding_attention")
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Keys that earlier releases have beside the table."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields of another kind than `kind` are not used."""

    kind: str
    factor: float
    original_positions: int = 0
    """Of llama3, yarn and longrope: positions before the stretching."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Of llama3."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    """Of yarn: turns between which frequencies are blended, at whole dimensions if truncated."""
    attention_factor: float = 1.0
    """Of yarn and longrope: cosines and sines are multiplied by it."""
    mscale_all_dim: float = 0.0
    """Of yarn in latent attention, which multiplies scores by (0.1 * it * ln(factor) + 1)^2."""
    query_beta: float = 0.0
    """Of yarn in Ministral 3, which multiplies a rotated query by
    1 + it * ln(1 + floor(position / original_positions))."""
    short_factors: tuple[float, ...] = ()
    """Of longrope: what each frequency is divided by, in sequences of the original positions."""


def read_rope(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The one meaning of both spellings, with `rope_theta` and `rope_type`.

    `folder` is for messages. Raises InputError for spellings that disagree, or tables in the table.
    """
    family = _family_of(values)
    of_full = family is not None and family.stretches_full_layers
    found: dict[str, tuple[Any, str]] = {}
    spellings = [
        (key, _table(values, key, folder, of_full=of_full and key == "rope_parameters"))
        for key in _TABLES
        if values.get(key)
    ]
    if not spellings and family and "rope_parameters" in family.defaults:
        spellings = [("rope_parameters", family.defaults["rope_parameters"])]
    beside = {key: values[key] for key in _BESIDE if values.get(key) is not None}
    for where, table in [*spellings, ("config.json", beside)]:
        for key, value in table.items():
            other, place = found.setdefault(key, (value, where))
            if other != value:
                raise InputError(
                    f"{folder}: config.json has two values of {key}: {other!r} ({place}) and "
                    f"{value!r} ({where}): leave the one with which the model was trained"
                )
    rope = {key: value for key, (value, _) in found.items()}
    theta = family.defaults.get("rope_theta", _DEFAULT_THETA) if family else _DEFAULT_THETA
    if of_full and not values.get("rope_parameters") and rope.get("rope_theta", theta) != theta:
        # transformers 5.19 would give it to one kind of layer alone.
        raise InputError(
            f"{folder}: rope_theta={rope['rope_theta']} is not supported besides rope_scaling: "
            f"{theta}, or rope_parameters with a table for each kind of layer"
        )
    rope.setdefault("rope_theta", theta)
    rope.setdefault("rope_type", "default")
    if not isinstance(rope["rope_theta"], int | float):
        raise InputError(f"{folder}: rope_theta is {rope['rope_theta']!r}, not a number")
    return rope


def _family_of(values: dict[str, Any]) -> Family | None:
    return FAMILIES.get((values.get("architectures") or ["none"])[0])


def _of_full_layers(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The rotary table of layers without a window.

    Raises InputError unless layers with a window have the same angles, not stretched.
    """
    full, windowed = (table.get(kind) or {} for kind in _KINDS)
    if windowed != _unstretched(full):
        raise InputError(
            f"{folder}: rope_parameters has {windowed} for {_KINDS[1]} and {full} for {_KINDS[0]}, "
            "which is not supported: the same rope_theta for both, and rope_type 'default' for "
            f"{_KINDS[1]}"
        )
    return full


def _unstretched(rope: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta")}


def _table(values: dict[str, Any], key: str, folder: Path, *, of_full: bool) -> dict[str, Any]:
    """One of the tables, its kind always as `rope_type`.

    of_full: it has a table for each kind of layer, of which it is that of layers without a window.
    """
    table = values[key]
    if not isinstance(table, dict):
        raise InputError(f"{folder}: {key} is {table!r:.80}, not a table")
    if of_full:
        table = _of_full_layers(table, folder)
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
    # Qwen's positions in time, height and width are equal for text; Phi's older word is "su".
    return {**given, "rope_type": {"mrope": "default", "su": "longrope"}.get(kind, kind)}


def in_both_spellings(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values with the spelling that they lack, so that every engine finds one. Raises
    InputError as `read_rope`."""
    if not any(key in values for key in (*_TABLES, "rope_theta")):
        return values
    rope = read_rope(values, folder)
    scaling = {key: value for key, value in rope.items() if key not in _BESIDE}
    found = dict(values)
    family = _family_of(values)
    is_split = family is not None and family.stretches_full_layers
    tables = dict(zip(_KINDS, (rope, _unstretched(rope)), strict=True)) if is_split else rope
    found.setdefault("rope_parameters", tables)
    for key in _BESIDE:
        if key in rope:
            found.setdefault(key, rope[key])
    if rope["rope_type"] != "default":
        found.setdefault("rope_scaling", scaling)
    return found


def rope_scaling(rope: dict[str, Any], values: dict[str, Any], folder: Path) -> RopeScaling | None:
    """Scaling from what `read_rope` returns, and from the other values of config.json."""
    kind, known = rope["rope_type"], FAMILIES[values["architectures"][0]].rope_types
    if kind not in known:
        raise InputError(
            f"{folder}: rope type {kind!r} is not supported; supported: {', '.join(known)}"
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
    if kind == "longrope":
        return _longrope(rope, values["max_position_embeddings"], int(positions))
    return RopeScaling(
        kind,
        float(rope["factor"]),
        int(positions),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
    )


def scaled_queries(scaling: RopeScaling | None, rope: dict[str, Any], folder: Path) -> RopeScaling:
    """The scaling of a model whose queries grow with their position. Raises InputError."""
    beta, positions = (
        rope.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if scaling is None or scaling.kind != "yarn" or not beta or not positions:
        raise InputError(
            f"{folder}: rope_parameters has rope_type={rope['rope_type']!r}, llama_4_scaling_beta="
            f"{beta!r} and original_max_position_embeddings={positions!r}: Ministral 3 needs "
            "'yarn' and both numbers, as in its published folders"
        )
    return replace(scaling, query_beta=float(beta))


def _longrope(rope: dict[str, Any], positions: int, original: int) -> RopeScaling:
    """As transformers up to the original positions. Source: arXiv 2402.13753, section 3."""
    factor = float(rope.get("factor") or positions / original)
    by_length = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = rope.get("attention_factor")
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=by_length if given is None else float(given),
        short_factors=tuple(map(float, rope["short_factor"])),
    )


def check_length(scaling: RopeScaling | None, tokens: int, what: str) -> None:
    """Raise InputError for a sequence that longrope's factors for short ones do not suit.

    what: where the number of tokens comes from.
    """
    if scaling is not None and scaling.kind == "longrope" and tokens > scaling.original_positions:
        # SGLang 0.5.23 takes the long factors for a whole batch if one of its sequences is longer.
        raise InputError(
            f"{what} = {tokens}, and the model has rope type 'longrope', whose factors for short "
            f"sequences alone are supported: at most {scaling.original_positions} "
            "(original_max_position_embeddings)"
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
