"""Base of all sections of the configuration tree. Imported by every process."""

import math
from typing import Any

import pydantic


class Section(pydantic.BaseModel):
    """Frozen, and strict about unknown keys and NaN."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )

    @pydantic.field_validator("*")
    @classmethod
    def _refuse_nan(cls, value: Any) -> Any:
        # NaN passes each comparison with a limit that it should fail.
        if isinstance(value, float) and math.isnan(value):
            raise ValueError("not a number (nan): give a number")
        return value


def merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The base's values, with given values in their place; tables merge key by key."""
    found = dict(base)
    for key, value in given.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        found[key] = value
    return found
