"""Base of all sections of the configuration tree. Imported by every process."""

import pydantic


class Section(pydantic.BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
