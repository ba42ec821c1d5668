"""The whole state of the queue as bytes, for the ledger.

It is a pickle, so that a field that somebody adds later cannot be forgotten. It never leaves the
run folder, which only its user can read, and loads no other classes than those of `_may_load`.
Prompts and the configuration are named in it; the process that reads it has its own.
"""

import hashlib
import io
import pickle
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pydantic

import megatron_rl
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets

_SOURCES = ("algorithms", "config", "data", "evaluation", "protocol", "rollout_queue")
"""Packages whose code the queue runs."""
_MODULES = ("megatron_rl", "numpy", "collections", "pathlib", "pydantic", "msgspec")
_BUILTINS = frozenset({"set", "frozenset", "bytearray", "complex", "slice", "range"})
_COPYREG = frozenset({"_reconstructor", "__newobj__"})


class References:
    """Objects that a state names instead of containing them."""

    def __init__(self, config: Config, prompts: PromptSets, **others: object) -> None:
        """others: further objects by name; None for one that this run lacks."""
        self._objects: dict[Any, object] = {"config": config, "prompts": prompts, **others}
        self._objects |= enumerate(prompts.all)
        self._names = {id(one): name for name, one in self._objects.items() if one is not None}

    def name_of(self, one: object) -> Any:
        """The name of an object; None if the state contains it."""
        return self._names.get(id(one))

    def find(self, name: Any) -> object:
        """The object of a name. Raises KeyError."""
        return self._objects[name]


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, references: References) -> None:
        super().__init__(file, protocol=5)
        self._references = references

    def persistent_id(self, obj: object) -> Any:
        return self._references.name_of(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: References) -> None:
        super().__init__(file)
        self._references = references

    def persistent_load(self, pid: Any) -> object:
        return self._references.find(pid)

    def find_class(self, module: str, name: str) -> Any:
        if not _may_load(module, name):
            raise pickle.UnpicklingError(f"a state of the queue has no {module}.{name}")
        return super().find_class(module, name)


def _may_load(module: str, name: str) -> bool:
    if module == "builtins":
        return name in _BUILTINS
    if module == "copyreg":
        return name in _COPYREG
    return module.partition(".")[0] in _MODULES


def dump(parts: object, references: References, file: BinaryIO) -> None:
    """Write the state of these objects."""
    _Pickler(file, references).dump(parts)


def load(state: bytes | memoryview, references: References) -> Any:
    """The objects of a state. Raises pickle.UnpicklingError, EOFError, KeyError."""
    return _Unpickler(io.BytesIO(state), references).load()


def program_digest() -> str:
    """Digest of the queue's code and of the libraries whose objects a state holds.

    Other code may lack a field of the state, or answer the same messages differently.
    """
    libraries = [sys.version, np.__version__, msgspec.__version__, pydantic.__version__]
    digest = hashlib.sha256("\n".join(libraries).encode())
    root = Path(megatron_rl.__file__).parent
    for path in sorted(path for name in _SOURCES for path in (root / name).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
