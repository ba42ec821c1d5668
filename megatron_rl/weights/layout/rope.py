"""The rotary embedding of a config.json, in both spellings. Pure functions of its values.

transformers 5 writes one table, `rope_parameters`; earlier releases and most files on the Hub have
`rope_theta` and `rope_scaling`. An engine may read the other one than the trainer.
"""

from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.families import FAMILIES

_DEFAULT_THETA = 10000.0
"""Default of transformers 5."""
_TABLES = ("rope_parameters", "rope_scaling")
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Keys that earlier releases have beside the table."""


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
