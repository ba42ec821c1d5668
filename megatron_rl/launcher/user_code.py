"""Finds the files with the functions that a configuration names as `package.module:function`.

Used by the launcher, which records their digests: a resumed run says which of them have changed.
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_rl.config.tree import Config

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_OURS = ("megatron_rl", "verification", "generation")


def code_files(config: Config) -> list[Path]:
    """Files of the user's modules by path; not of what they import, nor of our own packages."""
    modules = {match[1] for text in _texts(config.model_dump()) if (match := _NAME.fullmatch(text))}
    users = (name for name in modules if name.partition(".")[0] not in _OURS)
    return sorted({path for name in users if (path := _file_of(name)) is not None})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _file_of(module: str) -> Path | None:
    """The file that `import` would take; None: there is none. Executes nothing of the user's."""
    # An environment's process looks into its working directory first.
    places: list[str] | None = [os.getcwd(), *sys.path]
    parts = module.split(".")
    spec = None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    is_file = spec is not None and spec.has_location and spec.origin is not None
    return Path(spec.origin).resolve() if is_file else None
