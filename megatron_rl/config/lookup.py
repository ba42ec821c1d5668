"""Resolves a configured name to a function: a table entry, or `package.module:function`.

Used by every process at start.
"""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from megatron_rl.config.errors import InputError

Function = TypeVar("Function")
"""A callable of the table's kind, or None where the table has it."""


def find_function(table: Mapping[str, Function], name: str, *, key: str) -> Function:
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
        found: Any = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise InputError(f"{key}={name!r}: cannot import {module_name}: {error}") from error
    if not callable(found):
        raise InputError(f"{key}={name!r}: {module_name} has no function {function_name!r}")
    function: Function = found
    return function
