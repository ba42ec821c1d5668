"""Finds the files with the functions that a configuration names as `package.module:function`.

Used by the launcher, which records their digests: a resumed run says which of them have changed.
"""

import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_rl.config.layers import leaves
from megatron_rl.config.tree import Config

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_OURS = ("megatron_rl", "verification", "generation")


def code_files(config: Config) -> list[Path]:
    """Files of the modules that the configuration names, sorted; without those of our packages."""
    values = (value for _, value in leaves(config.model_dump(), ""))
    listed = (one for value in values for one in (value if isinstance(value, list) else [value]))
    matches = (_NAME.fullmatch(one) for one in listed if isinstance(one, str))
    modules = {match[1] for match in matches if match}
    users = (name for name in modules if name.partition(".")[0] not in _OURS)
    return sorted({path for name in users if (path := _file_of(name)) is not None})


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
