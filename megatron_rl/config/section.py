"""Base of all sections of the configuration tree. Imported by every process."""

from typing import Any

import pydantic


class Section(pydantic.BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


def merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The base's values, with given values in their place; tables merge key by key."""
    found = dict(base)
    for key, value in given.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        found[key] = value
    return found
