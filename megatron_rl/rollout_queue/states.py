"""The whole state of the queue as bytes, for the ledger.

It is a pickle, so that a field that somebody adds later cannot be forgotten. It never leaves the
run folder, which only its user can read, and loads no other classes than those of `_may_load`.
Prompts and the configuration are named in it; the process that reads it has its own. Rollouts,
almost all of its bytes, are named by their places in the logs.
"""

import copyreg
import functools
import hashlib
import io
import pickle
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import pydantic

import megatron_rl
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.frames import decode_frames
from megatron_rl.protocol.ledger import LOG, read_entry, segment_path
from megatron_rl.protocol.types import Rollout, RolloutDone

_SOURCES = ("algorithms", "config", "data", "evaluation", "protocol", "rollout_queue")
"""Packages whose code the queue runs."""
_MODULES = ("megatron_rl", "numpy", "collections", "pathlib", "pydantic", "msgspec")
_BUILTINS = frozenset({"set", "frozenset", "bytearray", "complex", "slice", "range"})
_COPYREG = frozenset({"_reconstructor", "__newobj__"})
_PROTOCOL = 5
MOST_LOGS = 8
"""Logs whose rollouts a state may name: they stay on the disk."""


class Place(NamedTuple):
    """A record in the logs of the ledger, by the bytes of its log."""

    segment: int
    begin: int
    end: int


class References:
    """Objects that a state names instead of containing them.

    A rollout is named by its place in a log, if that is one of the MOST_LOGS logs before the state.
    """

    def __init__(
        self, config: Config, prompts: PromptSets, *, folder: Path, **others: object
    ) -> None:
        """folder: of the ledger. others: further objects by name; None: this run lacks it."""
        self._objects: dict[Any, object] = {"config": config, "prompts": prompts, **others}
        self._objects |= enumerate(prompts.all)
        self._names = {id(one): name for name, one in self._objects.items() if one is not None}
        self._kinds = {Rollout, *map(type, self._objects.values())}
        self._folder = folder
        self._rollouts: WeakValueDictionary[Place, Rollout] = WeakValueDictionary()

    def note(self, rollout: Rollout, place: Place) -> None:
        """The rollout is in a log."""
        self._rollouts[place] = rollout

    def dump(self, parts: object, file: BinaryIO, *, number: int) -> list[Place]:
        """Write the state of these objects; returns the places of rollouts that it names.

        number: of the segment that begins with the state.
        """
        held = list(self._rollouts.items())  # an id belongs to its object while that is held
        # Not relative to the newest rollout, which may be freed: a later state would then name the
        # rollouts of a log that was removed.
        places = {
            id(rollout): place for place, rollout in held if place.segment >= number - MOST_LOGS
        }
        named: list[Place] = []

        def reduce(one: Any) -> Any:
            if (place := places.get(id(one))) is not None:
                named.append(place)
                return _find, tuple(place)
            name = self._names.get(id(one))
            return one.__reduce_ex__(_PROTOCOL) if name is None else (_find, (name,))

        pickler = pickle.Pickler(file, _PROTOCOL)
        pickler.dispatch_table = copyreg.dispatch_table | dict.fromkeys(self._kinds, reduce)
        pickler.dump(parts)
        return named

    def find(self, *name: Any) -> object:
        """The object of a name. Raises KeyError, OSError."""
        if len(name) == 1:
            return self._objects[name[0]]
        place = Place(*name)
        path = segment_path(self._folder, place.segment, LOG)
        entry = read_entry(path, place.begin, place.end)
        if entry is None:
            raise KeyError(place)
        rollout: Rollout = decode_frames(entry.frames, RolloutDone).rollout
        self.note(rollout, place)
        return rollout

    def load(self, state: bytes | memoryview) -> Any:
        """The objects of a state. Raises pickle.UnpicklingError, EOFError, KeyError, OSError."""
        return _Unpickler(io.BytesIO(state), self).load()


def _find(*name: Any) -> object:
    """Stands in a state for `References.find` of the process that loads it."""
    raise AssertionError(name)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: References) -> None:
        super().__init__(file)
        self._references = references

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _find.__name__):
            return self._references.find
        if not _may_load(module, name):
            raise pickle.UnpicklingError(f"a state of the queue has no {module}.{name}")
        return super().find_class(module, name)


def _may_load(module: str, name: str) -> bool:
    if module == "builtins":
        return name in _BUILTINS
    if module == "copyreg":
        return name in _COPYREG
    return module.partition(".")[0] in _MODULES


@functools.cache
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
