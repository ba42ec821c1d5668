"""Base of all sections of the configuration tree. Imported by every process."""

import math
from pathlib import Path
from types import NoneType
from typing import Any, Self, get_args

import pydantic


class Section(pydantic.BaseModel):
    """Frozen, and strict about unknown keys, NaN and empty paths."""

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

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _unset_empty_path(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """None for an empty text where a path may be missing. Raises ValueError elsewhere."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = (kind, *get_args(kind))
        if Path not in kinds:
            return value
        if value == "" and NoneType in kinds:
            return None
        # Path("") would be the current folder.
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError(f"{info.field_name} is an empty path: give a file or folder")
        return value

    def replaced(self, **sections: dict[str, Any]) -> Self:
        """A copy with other values of these sections' keys, as it stands: nothing is checked."""
        changed = {key: getattr(self, key).model_copy(update=new) for key, new in sections.items()}
        return self.model_copy(update=changed)


def merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The base's values, with given values in their place; tables merge key by key."""
    found = dict(base)
    for key, value in given.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        found[key] = value
    return found
