"""Values built anew from what `encoding.py` makes of them.

Runs inside the sandbox, in the process of the tests and in that of the solution.
"""

import collections
import itertools
from collections.abc import Iterable
from typing import Any

from verification.sandbox import package_values
from verification.sandbox.encoding import FACTORIES, Malformed

_NOTHING: Any = object()


class Decoder:
    """Builds values from nodes; `objects[i]` is what `nodes[i]` stands for.

    Subclasses add kinds: `make_NAME` builds what needs its parts first, `shell_NAME` makes what
    `fill_NAME` completes later, so that it may contain itself.
    """

    def __init__(self, data: Any, known: Iterable[Any] = ()) -> None:
        if not isinstance(data, list) or len(data) != 2 or not isinstance(data[1], list):
            raise Malformed("no value")
        self.root, self.nodes = data
        self.objects = list(known)
        self.objects += [_NOTHING] * (len(self.nodes) - len(self.objects))

    def decode(self) -> Any:
        """The value of the message; Malformed for what no encoder makes."""
        todo = [i for i, made in enumerate(self.objects) if made is _NOTHING]
        shells = []
        for i in todo:
            shell = getattr(self, f"shell_{self._tag(i)}", None)
            if shell is not None:
                self.objects[i] = shell(*self.nodes[i][1:])
                shells.append(i)
        for i in todo:
            self._make(i)
        # Keys are hashed when they are filled in, so what may be a key is complete by then.
        for i in sorted(shells, key=lambda i: self._tag(i) in _HASHING):
            self.fill(i, self.objects[i])
        return self.value(self.root)

    def fill(self, index: int, target: Any) -> None:
        """Complete an object from the node of that index."""
        getattr(self, f"fill_{self._tag(index)}")(target, *self.nodes[index][1:])

    def value(self, slot: Any) -> Any:
        """Value of a slot."""
        if type(slot) is not list:
            return slot
        return self.objects[self._reference(slot)]

    def values(self, slots: Any) -> list[Any]:
        """Values of several slots."""
        return [self.value(slot) for slot in slots]

    def _tag(self, index: int) -> str:
        node = self.nodes[index]
        if not isinstance(node, list) or not node or not isinstance(node[0], str):
            raise Malformed("a node without a tag")
        return node[0]

    def _reference(self, slot: Any) -> int:
        if len(slot) != 1 or type(slot[0]) is not int or not 0 <= slot[0] < len(self.objects):
            raise Malformed("a reference to nothing")
        return slot[0]

    def _make(self, index: int) -> None:
        """Build a node that needs its parts first, and before it those parts."""
        stack, entered = [index], set()
        while stack:
            i = stack[-1]
            if self.objects[i] is not _NOTHING:
                stack.pop()
                continue
            parts = [part for part in self._parts(self.nodes[i]) if self.objects[part] is _NOTHING]
            if parts:
                if i in entered:
                    raise Malformed("a value that contains itself")
                entered.add(i)
                stack += parts
                continue
            make = getattr(self, f"make_{self._tag(i)}", None)
            if make is None:
                raise Malformed("an unknown kind of value")
            self.objects[i] = make(*self.nodes[i][1:])

    def _parts(self, node: list[Any]) -> list[int]:
        """Indices that the slots of a node refer to."""
        layers = _LAYERS.get(node[0], ())
        slots: list[Any] = []
        for position, depth in layers:
            found = [node[position]]
            for _ in range(depth):
                found = list(itertools.chain.from_iterable(found))
            slots += found
        return [self._reference(slot) for slot in slots if type(slot) is list]

    def _pairs(self, pairs: Any) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in pairs]

    make_plain = staticmethod(lambda value: value)
    make_int = staticmethod(lambda text: int(text, 16))
    make_bytes = staticmethod(bytes.fromhex)
    make_complex = staticmethod(complex)
    make_ellipsis = staticmethod(lambda: ...)
    make_ndarray = staticmethod(package_values.make_ndarray)
    shell_list = staticmethod(lambda slots: [])
    shell_dict = staticmethod(lambda pairs: {})
    shell_set = staticmethod(lambda slots: set())
    shell_bytearray = staticmethod(lambda text: bytearray())
    shell_deque = staticmethod(lambda slots, size: collections.deque(maxlen=size))
    shell_counter = staticmethod(lambda pairs: collections.Counter())
    shell_ordered = staticmethod(lambda pairs: collections.OrderedDict())
    shell_defaultdict = staticmethod(
        lambda pairs, name: collections.defaultdict(FACTORIES.get(name))
    )

    def make_tuple(self, slots: Any) -> Any:
        return tuple(self.values(slots))

    def make_frozenset(self, slots: Any) -> Any:
        return frozenset(self.values(slots))

    def make_range(self, *numbers: str) -> Any:
        return range(*(int(number, 16) for number in numbers))

    def make_slice(self, *slots: Any) -> Any:
        return slice(*self.values(slots))

    def make_keys(self, slots: Any) -> Any:
        return dict.fromkeys(self.values(slots)).keys()

    def make_values(self, slots: Any) -> Any:
        return dict(enumerate(self.values(slots))).values()

    def make_items(self, pairs: Any) -> Any:
        return dict(self._pairs(pairs)).items()

    def make_namedtuple(self, name: str, fields: Any, slots: Any) -> Any:
        return self.namedtuple_class(name, tuple(fields))(*self.values(slots))

    def namedtuple_class(self, name: str, fields: tuple[str, ...]) -> Any:
        """Class of that name with these fields."""
        return collections.namedtuple(name, fields)

    def make_enum(self, name: str, mixin: str, members: Any, member: str, slot: Any) -> Any:
        pairs = [(key, self.value(item)) for key, item in members]
        kind = self.enum_class(name, mixin, pairs)
        # A combination of flags is no member.
        return kind[member] if member in kind.__members__ else kind(self.value(slot))

    def enum_class(self, name: str, mixin: str, members: list[tuple[str, Any]]) -> Any:
        """Enumeration of that name with these members."""
        import enum

        base = {"int": enum.IntEnum, "str": enum.StrEnum}.get(mixin, enum.Enum)
        return base(name, members)

    def make_sympy(self, name: str, slots: Any, more: Any) -> Any:
        return package_values.make_expression(name, self.values(slots), more)

    def make_fraction(self, numerator: str, denominator: str) -> Any:
        import fractions

        return fractions.Fraction(int(numerator, 16), int(denominator, 16))

    def make_decimal(self, text: str) -> Any:
        import decimal

        return decimal.Decimal(text)

    def make_timedelta(self, parts: Any) -> Any:
        import datetime

        return datetime.timedelta(*parts)

    def make_date(self, *parts: int) -> Any:
        import datetime

        return datetime.date(*parts)

    def make_datetime(self, parts: Any, offset: Any) -> Any:
        import datetime

        return datetime.datetime(*parts, tzinfo=offset and self.make_timezone(offset))

    def make_time(self, parts: Any, offset: Any) -> Any:
        import datetime

        return datetime.time(*parts, tzinfo=offset and self.make_timezone(offset))

    def make_timezone(self, parts: Any) -> Any:
        import datetime

        *offset, name = parts
        zone = datetime.timezone(datetime.timedelta(*offset))
        return zone if zone.tzname(None) == name else datetime.timezone(zone.utcoffset(None), name)

    def make_uuid(self, number: str) -> Any:
        import uuid

        return uuid.UUID(int=int(number, 16))

    def make_path(self, text: str) -> Any:
        import pathlib

        return pathlib.PurePosixPath(text)

    def fill_list(self, target: Any, slots: Any) -> None:
        target[:] = self.values(slots)

    def fill_set(self, target: Any, slots: Any) -> None:
        new = self.values(slots)
        target.clear()
        target.update(new)

    def fill_bytearray(self, target: Any, text: str) -> None:
        target[:] = bytes.fromhex(text)

    def fill_deque(self, target: Any, slots: Any, size: Any) -> None:
        new = self.values(slots)
        target.clear()
        target.extend(new)

    def fill_dict(self, target: Any, pairs: Any, *more: Any) -> None:
        new = self._pairs(pairs)
        target.clear()
        for key, item in new:
            target[key] = item

    fill_counter = fill_ordered = fill_defaultdict = fill_dict


_HASHING = frozenset({"set", "dict", "counter", "ordered", "defaultdict"})
# Tag -> where in its node the slots are, and in how many lists.
_LAYERS: dict[str, tuple[tuple[int, int], ...]] = {
    "tuple": ((1, 1),),
    "frozenset": ((1, 1),),
    "slice": ((1, 0), (2, 0), (3, 0)),
    "keys": ((1, 1),),
    "values": ((1, 1),),
    "items": ((1, 2),),
    "namedtuple": ((3, 1),),
    "enum": ((3, 2), (5, 0)),
    "exception": ((3, 1),),
    "iter": ((1, 1),),
    "sympy": ((2, 1),),
}

KIND_OF_TAG: dict[str, type] = {
    "list": list, "dict": dict, "set": set, "bytearray": bytearray, "deque": collections.deque,
    "counter": collections.Counter, "ordered": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}  # fmt: skip
"""Kinds of value that can be changed in place."""
