"""Resolves a configured name to a function: a table entry, or `package.module:function`.

Used by every process at start.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.config.errors import InputError


def find_function(
    table: Mapping[str, Callable[..., Any]], name: str, *, key: str
) -> Callable[..., Any]:
    """Function called `name`; `key` is the configuration key for the InputError's text."""
    if name in table:
        return table[name]
    module_name, separator, function_name = name.partition(":")
    if not separator:
        matches = difflib.get_close_matches(name, table, n=1)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise InputError(
            f"{key}={name!r} is neither one of {sorted(table)} nor package.module:function{hint}"
        )
    try:
        found = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise InputError(f"{key}={name!r}: cannot import {module_name}: {error}") from error
    if not callable(found):
        raise InputError(f"{key}={name!r}: {module_name} has no function {function_name!r}")
    return found
