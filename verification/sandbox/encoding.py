"""Values on the wire between the process of the tests and that of the solution.

Runs inside the sandbox, in both processes. A message holds [root, nodes]: a slot is a plain JSON
value or [index] of a node, and a node is [tag, payload...], so that cycles, shared parts and depth
survive. What comes back is always built anew from known kinds: no code of the solution is loaded.
What is no value by itself (functions, instances) each side adds: `solution_process.py`
and `remote_values.py`.
"""

import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any

from verification.sandbox import package_values

_INT_BITS = 1024


class Malformed(ValueError):
    """Not what an encoder makes."""


class Encoder:
    """Turns values into nodes; `nodes[i]` stands for `objects[i]`."""

    def __init__(self, describe: Callable[["Encoder", Any], list[Any]]) -> None:
        self._describe = describe
        """Node of what is no plain value."""
        self.nodes: list[Any] = []
        self.objects: list[Any] = []
        """Kept, so that no other object gets the same id meanwhile."""
        self._index: dict[int, int] = {}
        self._done = 0

    def know(self, objects: Iterable[Any]) -> None:
        """Take objects of an earlier message, with their indices."""
        for item in objects:
            self._add(item)

    def encode(self, value: Any) -> list[Any]:
        """[root, nodes] of a value."""
        root = self.slot(value)
        # A loop and no recursion: a linked list is as deep as it is long.
        while self._done < len(self.objects):
            self.nodes[self._done] = self._node(self.objects[self._done])
            self._done += 1
        return [root, self.nodes]

    def slot(self, value: Any) -> Any:
        """The value itself where JSON has it, else a reference to its node."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int and value.bit_length() <= _INT_BITS:
            return value
        found = self._index.get(id(value))
        return [self._add(value) if found is None else found]

    def slots(self, values: Iterable[Any]) -> list[Any]:
        """Slots of several values."""
        return [self.slot(value) for value in values]

    def state(self, names_and_values: Iterable[tuple[str, Any]]) -> list[Any]:
        """Slots of named values."""
        return [[name, self.slot(value)] for name, value in names_and_values]

    def _add(self, value: Any) -> int:
        index = self._index[id(value)] = len(self.objects)
        self.objects.append(value)
        self.nodes.append(None)
        return index

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        if "enum" in sys.modules and isinstance(kind, sys.modules["enum"].EnumMeta):
            return _dump_enum(self, value)
        if issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            return ["namedtuple", kind.__name__, list(kind._fields), self.slots(tuple(value))]
        for base in kind.__mro__:
            dump = _DUMPERS.get((base.__module__, base.__qualname__))
            if dump is not None:
                return dump(self, value)
        return self._describe(self, value)


def _dump_enum(encoder: Encoder, value: Any) -> list[Any]:
    mixin = next((base.__name__ for base in (int, str) if isinstance(value, base)), "")
    members = [[name, encoder.slot(item.value)] for name, item in type(value).__members__.items()]
    return ["enum", type(value).__name__, mixin, members, value.name, encoder.slot(value.value)]


def _dump_pairs(tag: str) -> Callable[[Encoder, Any], list[Any]]:
    def dump(encoder: Encoder, value: Any) -> list[Any]:
        return [tag, [[encoder.slot(key), encoder.slot(item)] for key, item in dict.items(value)]]

    return dump


def _dump_defaultdict(encoder: Encoder, value: Any) -> list[Any]:
    factory = value.default_factory
    name = factory.__name__ if factory in FACTORIES.values() else ""
    return ["defaultdict", _dump_pairs("")(encoder, value)[1], name]


def _dump_timedelta(value: Any) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _offset(value: Any) -> list[Any] | None:
    """Offset from UTC and name of the zone; None for a naive time."""
    offset = value.utcoffset()
    return None if offset is None else [*_dump_timedelta(offset), value.tzname() or ""]


def _fields(tag: str, *names: str) -> Callable[[Encoder, Any], list[Any]]:
    return lambda encoder, value: [tag, *(getattr(value, name) for name in names)]


def _items(tag: str) -> Callable[[Encoder, Any], list[Any]]:
    return lambda encoder, value: [tag, encoder.slots(value)]


def _time_fields(tag: str, *names: str) -> Callable[[Encoder, Any], list[Any]]:
    return lambda encoder, value: [tag, [getattr(value, n) for n in names], _offset(value)]


_CLOCK = ("hour", "minute", "second", "microsecond")
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)
}
FACTORIES["Counter"] = collections.Counter
FACTORIES["deque"] = collections.deque

# (module, name) of a class or a base of it -> its node.
_DUMPERS: dict[tuple[str, str], Callable[[Encoder, Any], list[Any]]] = {
    ("builtins", "bool"): lambda encoder, value: ["plain", bool(value)],
    ("builtins", "int"): lambda encoder, value: ["int", hex(int(value))],
    ("builtins", "float"): lambda encoder, value: ["plain", float(value)],
    ("builtins", "str"): lambda encoder, value: ["plain", str.__str__(value)],
    ("builtins", "list"): lambda encoder, value: ["list", encoder.slots(list.__iter__(value))],
    ("builtins", "tuple"): lambda encoder, value: ["tuple", encoder.slots(tuple.__iter__(value))],
    ("builtins", "set"): lambda encoder, value: ["set", encoder.slots(set.__iter__(value))],
    ("builtins", "frozenset"): _items("frozenset"),
    ("builtins", "dict"): _dump_pairs("dict"),
    ("builtins", "bytes"): lambda encoder, value: ["bytes", bytes(value).hex()],
    ("builtins", "bytearray"): lambda encoder, value: ["bytearray", bytes(value).hex()],
    ("builtins", "complex"): _fields("complex", "real", "imag"),
    ("builtins", "range"): lambda encoder, value: [
        "range", hex(value.start), hex(value.stop), hex(value.step)
    ],
    ("builtins", "slice"): lambda encoder, value: [
        "slice", *encoder.slots((value.start, value.stop, value.step))
    ],
    ("builtins", "dict_keys"): _items("keys"),
    ("builtins", "dict_values"): _items("values"),
    ("builtins", "dict_items"): lambda encoder, value: [
        "items", [encoder.slots(pair) for pair in value]
    ],
    ("builtins", "ellipsis"): lambda encoder, value: ["ellipsis"],
    ("collections", "deque"): lambda encoder, value: ["deque", encoder.slots(value), value.maxlen],
    ("collections", "Counter"): _dump_pairs("counter"),
    ("collections", "OrderedDict"): _dump_pairs("ordered"),
    ("collections", "defaultdict"): _dump_defaultdict,
    ("fractions", "Fraction"): lambda encoder, value: [
        "fraction", hex(value.numerator), hex(value.denominator)
    ],
    ("decimal", "Decimal"): lambda encoder, value: ["decimal", str(value)],
    ("datetime", "timedelta"): lambda encoder, value: ["timedelta", _dump_timedelta(value)],
    ("datetime", "datetime"): _time_fields(
        "datetime", "year", "month", "day", *_CLOCK
    ),
    ("datetime", "date"): _fields("date", "year", "month", "day"),
    ("datetime", "time"): _time_fields("time", *_CLOCK),
    ("datetime", "timezone"): lambda encoder, value: [
        "timezone", [*_dump_timedelta(value.utcoffset(None)), value.tzname(None)]
    ],
    ("uuid", "UUID"): lambda encoder, value: ["uuid", hex(value.int)],
    ("pathlib", "PurePath"): lambda encoder, value: ["path", str(value)],
    ("numpy", "ndarray"): package_values.dump_array,
    ("numpy", "generic"): package_values.dump_scalar,
    ("sympy.core.basic", "Basic"): package_values.dump_expression,
    ("sympy.matrices.matrixbase", "MatrixBase"): package_values.dump_matrix,
}  # fmt: skip
