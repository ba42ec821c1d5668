"""Resolves a configured name to a function: a table entry, or `package.module:function`.

Used by every process at start.
"""

import difflib
import importlib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.config.errors import InputError

Function = TypeVar("Function")
"""A callable of the table's kind, or None where the table has it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Hint with the known name that is most like a missing one; empty without a like one."""
    # A user may name the last part alone, or write another case.
    by_form = {one.casefold(): one for one in known}
    by_form |= {form.rsplit(".", 1)[-1]: one for form, one in by_form.items() if "." in form}
    wanted = name.casefold()
    found = difflib.get_close_matches(wanted, by_form, n=1, cutoff=0.6)
    found = found or difflib.get_close_matches(wanted.rsplit(".", 1)[-1], by_form, n=1, cutoff=0.6)
    return f"; did you mean {by_form[found[0]]!r}?" if found else ""


def find_function(table: Mapping[str, Function], name: str, *, key: str) -> Function:
    """The function `name`; raises InputError, whose text names the configuration key `key`."""
    if name in table:
        return table[name]
    module_name, separator, function_name = name.partition(":")
    if not separator:
        raise InputError(
            f"{key}={name!r} is neither one of {sorted(table)} nor package.module:function"
            f"{nearest(name, table)}"
        )
    try:
        found: Any = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise InputError(f"{key}={name!r}: cannot import {module_name}: {error}") from error
    except Exception as error:  # noqa: BLE001 a user's module may raise anything
        raise InputError(
            f"{key}={name!r}: importing {module_name} raised {type(error).__name__}: {error} "
            f"({where_raised(error)})"
        ) from error
    if not callable(found):
        raise InputError(f"{key}={name!r}: {module_name} has no function {function_name!r}")
    function: Function = found
    return function


def where_raised(error: BaseException) -> str:
    """File, line and function where the user's code raised.

    This is the deepest frame outside the standard library, installed packages and ours, because a
    mistake often surfaces in a library that the user's code called.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    paths = sysconfig.get_paths()
    libraries = tuple(paths[key] + os.sep for key in ("stdlib", "purelib", "platlib"))
    root = Path(__file__).resolve().parents[2]
    ours = tuple(f"{root / package}{os.sep}" for package in ("megatron_rl", "verification"))
    own = [f for f in frames if not f.filename.startswith((*libraries, *ours, "<"))]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
