"""Values on the wire between the tests' process and the solution's process: the table KINDS.

Runs inside the sandbox, in both processes. A message holds [root, nodes]. A slot is a plain JSON
value or [index] of a node; a node is [tag, slots of its parts, more JSON...]. Cycles, shared parts
and depth survive. The decoder builds only values of known kinds and loads no code of the solution.
Each side adds kinds for other objects (functions, instances).
"""

import collections
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from verification.sandbox import package_values

_INT_BITS = 1024
_NOTHING: Any = object()


class Malformed(ValueError):
    """A message that no encoder makes."""


class Opaque:
    """A result that cannot be sent: equal only to itself."""


class Kind(NamedTuple):
    """How values of one class are encoded."""

    make: Callable[..., Any]
    """Makes a value from (parts, *more); with `fill`, an incomplete value from `more`."""
    dump: Callable[[Any], tuple[Any, ...] | None] | None = None
    """(parts, *more) of a value; None for a value that cannot be sent."""
    fill: Callable[..., Any] | None = None
    """Completes a value in place from (value, parts, *more); the value may contain itself."""
    hashes: bool = False
    """Filling hashes the parts, which must be complete before."""


class Encoder:
    """Turns values into nodes; `nodes[i]` stands for `objects[i]`."""

    def __init__(
        self, describe: Callable[[Any], tuple[Any, ...]], known: Iterable[Any] = ()
    ) -> None:
        """describe: (tag, parts, *more) of other objects; known: objects that keep their indices
        of an earlier message."""
        self._describe = describe
        self.nodes: list[Any] = []
        self.objects: list[Any] = []
        """Keeps objects alive, so that no id is reused."""
        self._index: dict[int, int] = {}
        for item in known:
            self._add(item)

    def encode(self, value: Any) -> list[Any]:
        """[root, nodes] of a value."""
        root = self._slot(value)
        # No recursion: a linked list is as deep as it is long.
        while len(self.nodes) < len(self.objects):
            tag, parts, *more = self._dump(self.objects[len(self.nodes)])
            self.nodes.append([tag, [self._slot(part) for part in parts], *more])
        return [root, self.nodes]

    def _slot(self, value: Any) -> Any:
        """The value itself where JSON has it, else a reference to its node."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int and value.bit_length() <= _INT_BITS:
            return value
        found = self._index.get(id(value))
        return [self._add(value) if found is None else found]

    def _add(self, value: Any) -> int:
        index = self._index[id(value)] = len(self.objects)
        self.objects.append(value)
        return index

    def _dump(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if "enum" in sys.modules and isinstance(kind, sys.modules["enum"].EnumMeta):
            mixin = next((base.__name__ for base in (int, str) if isinstance(value, base)), "")
            members = kind.__members__
            parts = [*(member.value for member in members.values()), value.value]
            return "enum", parts, kind.__name__, mixin, list(members), value.name
        if issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            return "namedtuple", tuple(value), kind.__name__, list(kind._fields)
        for base in kind.__mro__:
            tag = f"{base.__module__}.{base.__qualname__}"
            if tag in KINDS:
                dumped = KINDS[tag].dump(value)  # type: ignore[misc]
                return ("opaque", ()) if dumped is None else (tag, *dumped)
        return self._describe(value)


class Decoder:
    """Builds the values of one message. Raises Malformed or an error of building a value."""

    def __init__(self, data: Any, kinds: dict[str, Kind], known: Iterable[Any] = ()) -> None:
        if not isinstance(data, list) or len(data) != 2 or not isinstance(data[1], list):
            raise Malformed("no value")
        self._kinds = kinds
        self._root, self.nodes = data
        self.objects = list(known)
        self.objects += [_NOTHING] * (len(self.nodes) - len(self.objects))

    def decode(self) -> Any:
        """The value of the message."""
        todo = [i for i, made in enumerate(self.objects) if made is _NOTHING]
        changeable = [i for i in todo if self._kind(i).fill]
        for i in changeable:
            _, _, *more = self.nodes[i]
            self.objects[i] = self._kind(i).make(*more)
        for i in todo:
            self._make(i)
        for i in sorted(changeable, key=lambda i: self._kind(i).hashes):
            self.fill(i, self.objects[i])
        return self._value(self._root)

    def fill(self, index: int, target: Any) -> None:
        """Complete an object from the node of that index."""
        _, slots, *more = self.nodes[index]
        fill = self._kind(index).fill
        assert fill is not None
        fill(target, [self._value(slot) for slot in slots], *more)

    def _kind(self, index: int) -> Kind:
        return self._kinds[self.nodes[index][0]]

    def _value(self, slot: Any) -> Any:
        return self.objects[_reference(slot)] if type(slot) is list else slot

    def _make(self, index: int) -> None:
        """Build a value, its parts first."""
        stack, entered = [index], set()
        while stack:
            i = stack[-1]
            if self.objects[i] is not _NOTHING:
                stack.pop()
                continue
            _, slots, *more = self.nodes[i]
            parts = [_reference(slot) for slot in slots if type(slot) is list]
            missing = [part for part in parts if self.objects[part] is _NOTHING]
            if not missing:
                self.objects[i] = self._kind(i).make([self._value(s) for s in slots], *more)
            elif i in entered:
                raise Malformed("a value that contains itself")
            entered.add(i)
            stack += missing


def _reference(slot: list[Any]) -> int:
    (index,) = slot
    if type(index) is not int or index < 0:
        raise Malformed("a reference to nothing")
    return index


def value_kinds(own: Callable[[str], Any], *, is_trusted: bool) -> dict[str, Kind]:
    """KINDS with named tuples and enumerations.

    own: this side's class of a name. is_trusted: an enumeration with the same member names is ours;
    otherwise the member values must be equal too.
    """
    classes: dict[str, Any] = {}

    def make_named(parts: list[Any], name: str, fields: Any) -> Any:
        found = own(name)
        is_same = getattr(found, "_fields", None) == tuple(fields)
        return (found if is_same else collections.namedtuple(name, fields))(*parts)

    def make_enum(parts: list[Any], name: str, mixin: str, names: Any, member: str) -> Any:
        import enum

        if any(one[:1] == "_" for one in names):
            # Enumerations treat such names specially.
            raise TypeError("no names of members")
        *values, value = parts
        found = own(name)
        is_own = isinstance(found, enum.EnumMeta) and list(found.__members__) == names
        if is_own and not is_trusted:
            is_own = [one.value for one in found.__members__.values()] == values
        if not is_own:
            base = {"int": enum.IntEnum, "str": enum.StrEnum}.get(mixin, enum.Enum)
            key = repr((name, mixin, names, values))
            if key not in classes:
                classes[key] = base(name, list(zip(names, values, strict=True)))
            found = classes[key]
        # A combination of flags is not a member.
        return found[member] if member in found.__members__ else found(value)

    return KINDS | {"namedtuple": Kind(make_named), "enum": Kind(make_enum)}


def _plain(parts: list[Any], value: Any) -> Any:
    if not isinstance(value, int | float | str):
        raise TypeError("no plain value")
    return value


def _changeable(kind: type, grow: Callable[[Any, Any], Any]) -> Kind:
    """A kind that the method `grow` fills."""

    def fill(target: Any, parts: list[Any], *more: Any) -> None:
        target.clear()
        grow(target, parts)

    return Kind(kind, lambda value: (kind.__iter__(value),), fill, hashes=grow is set.update)  # type: ignore[attr-defined]


def _mapping(make: Callable[..., Any], *more: Callable[[Any], Any]) -> Kind:
    """A kind of dictionary; its node also holds the results of the functions `more`."""

    def fill(target: Any, parts: list[Any], *more: Any) -> None:
        target.clear()
        for key, item in _pairs(parts):
            target[key] = item

    return Kind(
        make, lambda v: (_flat(dict.items(v)), *(one(v) for one in more)), fill, hashes=True
    )


def _flat(pairs: Iterable[Any]) -> Iterable[Any]:
    return itertools.chain.from_iterable(pairs)


def _pairs(parts: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(parts[::2], parts[1::2], strict=True)


def _constructed(tag: str, parts: Callable[[Any], Iterable[Any]]) -> Kind:
    """A kind whose class (named `tag`) makes a value from its parts."""

    def make(parts: list[Any]) -> Any:
        module, _, name = tag.rpartition(".")
        __import__(module)
        return getattr(sys.modules[module], name)(*parts)

    return Kind(make, lambda value: (parts(value),))


def _attributes(names: str) -> Callable[[Any], Iterable[Any]]:
    return lambda value: [getattr(value, name) for name in names.split()]


def _moment(names: str) -> Callable[[Any], Iterable[Any]]:
    """Attributes of a time and its offset from UTC."""

    def parts(value: Any) -> Iterable[Any]:
        offset, zone = value.utcoffset(), value.tzinfo
        fixed = sys.modules["datetime"].timezone
        if offset is not None and type(zone) is not fixed:
            zone = fixed(offset, value.tzname() or "")
        return [*_attributes(names)(value), None if offset is None else zone]

    return parts


_CLOCK = "hour minute second microsecond"
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (int, float, str, list, dict, set, tuple, bool)
    + (collections.Counter, collections.deque)
}

# Module and name of a class (or of its base) -> how its values are encoded.
KINDS: dict[str, Kind] = {
    "opaque": Kind(lambda parts: Opaque()),
    "builtins.int": Kind(lambda parts, text: int(text, 16), lambda v: ((), hex(int(v)))),
    "builtins.float": Kind(_plain, lambda v: ((), float(v))),
    "builtins.str": Kind(_plain, lambda v: ((), str.__str__(v))),
    "builtins.bytes": Kind(lambda parts, text: bytes.fromhex(text), lambda v: ((), bytes(v).hex())),
    "builtins.ellipsis": Kind(lambda parts: ..., lambda v: ((),)),
    "builtins.tuple": Kind(tuple, lambda v: (tuple.__iter__(v),)),
    "builtins.frozenset": Kind(frozenset, lambda v: (v,)),
    "builtins.dict_keys": Kind(lambda parts: dict.fromkeys(parts).keys(), lambda v: (v,)),
    "builtins.dict_values": Kind(lambda parts: dict(enumerate(parts)).values(), lambda v: (v,)),
    "builtins.dict_items": Kind(lambda parts: dict(_pairs(parts)).items(), lambda v: (_flat(v),)),
    "builtins.list": _changeable(list, list.extend),
    "builtins.set": _changeable(set, set.update),
    "builtins.bytearray": _changeable(bytearray, bytearray.extend),
    "builtins.dict": _mapping(dict),
    "collections.Counter": _mapping(collections.Counter),
    "collections.OrderedDict": _mapping(collections.OrderedDict),
    "collections.defaultdict": _mapping(
        lambda name: collections.defaultdict(_FACTORIES.get(name)),
        lambda v: getattr(v.default_factory, "__name__", ""),
    ),
    "collections.deque": _changeable(collections.deque, collections.deque.extend)._replace(
        make=lambda size: collections.deque(maxlen=size), dump=lambda v: (v, v.maxlen)
    ),
    "numpy.ndarray": Kind(package_values.make_array, package_values.dump_array),
    "numpy.generic": Kind(package_values.make_array, package_values.dump_array),
    "sympy.core.basic.Basic": Kind(package_values.make_expression, package_values.dump_expression),
    "sympy.matrices.matrixbase.MatrixBase": Kind(
        package_values.make_expression, package_values.dump_matrix
    ),
} | {
    tag: _constructed(tag, parts)
    for tag, parts in {
        "builtins.complex": _attributes("real imag"),
        "builtins.range": _attributes("start stop step"),
        "builtins.slice": _attributes("start stop step"),
        "fractions.Fraction": _attributes("numerator denominator"),
        "decimal.Decimal": lambda v: [str(v)],
        "pathlib.PurePath": lambda v: [str(v)],
        "uuid.UUID": lambda v: [str(v)],
        "datetime.timedelta": _attributes("days seconds microseconds"),
        "datetime.timezone": lambda v: v.__getinitargs__(),
        "datetime.date": _attributes("year month day"),
        "datetime.datetime": _moment(f"year month day {_CLOCK}"),
        "datetime.time": _moment(_CLOCK),
    }.items()
}


CHANGEABLE = frozenset(tag for tag, kind in KINDS.items() if kind.fill) | {"instance"}
"""Tags of values that a call may change in place."""
