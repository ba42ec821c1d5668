"""Proxies in the tests' process for objects of the solution.

Runs inside the sandbox, in the tests' process. Methods run in the solution's process and return
values. This module decides equality by class names and attributes: it neither asks a method of the
solution nor shows the solution an expected result.
"""

import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from verification.sandbox.solution_process import SPECIAL, state_of

UNIT_TESTS_FILE = "unit_tests.py"
_SINGLE_ITEMS = 8
_BATCH_ITEMS = 256
# These methods turn an object into a value, and so could claim that two things are the same.
_TELLING = frozenset(
    "__bool__ __len__ __iter__ __next__ __int__ __float__ __index__ __round__".split()
)
# These operators collect a value; `__isub__` would make a difference.
_GATHERING = frozenset({"__iadd__", "__imul__", "__ior__"})
_FORWARDED = "__len__ __index__ __round__ __getitem__ __setitem__ __delitem__ __enter__".split()
_comparing: set[tuple[int, int]] = set()


class Record:
    """Facts about an object of the solution."""

    def __init__(self, link: Any, handle: int, name: str, *, specials: Any, names: Any) -> None:
        self.link = link
        self.handle = handle
        self.name = name
        self.specials = frozenset(specials)
        self.names = {name for _, name in names}
        """Names of the object's class and its bases; for a class its own."""
        self.state: dict[str, Any] | None = None
        self.epoch = -1
        """The link's epoch of `state`; a later call may have changed the object."""
        self.has_met_value = False
        """An operator made the object from a value of the tests, perhaps an expected result."""
        self.met_kinds: set[type] = set()
        """Kinds of value that the operation has with right solutions."""

    def ask(self, op: str, *payload: Any, **options: Any) -> Any:
        """The solution's answer about the object."""
        return self.link.ask(op, self.handle, *payload, **options)

    def method(self, name: str, *arguments: Any) -> Any:
        """Result of a special method."""
        if name not in self.specials:
            raise TypeError(f"{self.name!r} object has no {name}")
        if self.has_met_value and name in _TELLING:
            raise TypeError(f"{name} of the difference from a value says what one likes to hear")
        return self.ask("method", name, arguments)

    def hides(self, name: str) -> bool:
        """Whether an attribute could claim that the object is the value that tests expect.

        Tests that know classes of the solution may ask their objects anything.
        """
        if self.link.knows_classes:
            return False
        if name == "equals" and "sympy" in sys.modules:
            return True
        return any(hasattr(kind, name) for kind in self.met_kinds)

    def text(self, name: str, *arguments: Any) -> str:
        """Result of a special method that must return text."""
        found = self.method(name, *arguments)
        if not isinstance(found, str):
            raise TypeError("a text was expected")
        return found

    def current_state(self) -> dict[str, Any] | None:
        """Current attributes."""
        if self.epoch != self.link.epoch:
            self.ask("get")
        return self.state


class RemoteObject:
    """An instance of a class of the solution."""

    __slots__ = ("_remote", "__weakref__")
    _remote: Record

    def __init__(self, record: Record) -> None:
        object.__setattr__(self, "_remote", record)

    def __getattr__(self, name: str) -> Any:
        record = self._remote
        if name in ("__name__", "__qualname__"):
            return record.name
        if name == "__dict__":
            return record.current_state() or {}
        # SymPy and mpmath ask `_sympy_` and `_mpmath_` for the value that an object stands for.
        if name[:2] == "__" or (name[:1] == name[-1:] == "_") or record.hides(name):
            raise AttributeError(name)
        if record.epoch == record.link.epoch and record.state and name in record.state:
            return record.state[name]
        return record.ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote.ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._remote.ask("delattr", name)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        own = self._remote.link.own_class(self._remote.name)
        return type(self) if own is None else own

    def __copy__(self) -> Any:
        return self._remote.ask("copy", False)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._remote.ask("copy", True)

    def __bool__(self) -> bool:
        for method in ("__bool__", "__len__"):
            if method in self._remote.specials:
                return bool(self._remote.method(method))
        return True

    def __iter__(self) -> Iterator[Any]:
        if "__next__" in self._remote.specials:
            return self
        if "__iter__" in self._remote.specials:
            found = self._remote.method("__iter__")
            return found if hasattr(found, "__next__") else iter(found)
        return self._items()

    def _items(self) -> Iterator[Any]:
        for index in range(len(self) if "__len__" in self._remote.specials else sys.maxsize):
            try:
                item = self[index]
            except IndexError:
                return
            yield item

    def __next__(self) -> Any:
        items, end, last = self._remote.ask("advance", None, None, 1)
        if items:
            return items[0]
        if end == "raised":
            raise last
        raise StopIteration(last)

    def __contains__(self, wanted: Any) -> bool:
        # The solution must not see the wanted value.
        return any(item is wanted or item == wanted for item in self)

    def __int__(self) -> int:
        return self._remote.method(self._first("__int__", "__index__"))

    def __float__(self) -> float:
        return self._remote.method(self._first("__float__", "__index__"))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        self._remote.method("__exit__", None, None, None)

    def __str__(self) -> str:
        return self._text(self._first("__str__", "__repr__"))

    def __repr__(self) -> str:
        return self._text("__repr__")

    def _text(self, method: str) -> str:
        if method in self._remote.specials:
            return self._remote.text(method)
        return f"<{self._remote.name} object>"

    def __format__(self, form: str) -> str:
        if "__format__" in self._remote.specials:
            return self._remote.text("__format__", form)
        return format(str(self), form)

    def _first(self, method: str, other: str) -> str:
        return method if method in self._remote.specials else other

    def __hash__(self) -> int:
        return hash(self._remote.name)

    def __eq__(self, other: object) -> Any:
        if other is self:
            return True
        if isinstance(other, RemoteObject):
            theirs, name = other._remote.current_state(), other._remote.name
        else:
            kind = type(other)
            if kind.__module__ != "__main__" and kind is not types.SimpleNamespace:
                return False
            if kind.__module__ == "__main__" and kind.__eq__ is not object.__eq__:
                # Let the tests' own class decide.
                return NotImplemented
            theirs, name = state_of(other), kind.__name__
        ours = self._remote.current_state()
        if ours is None or theirs is None or name != self._remote.name:
            return False
        pair = (id(self), id(other))
        if pair in _comparing:
            # An object that contains itself: equal if the rest is equal.
            return True
        _comparing.add(pair)
        try:
            return ours == theirs
        finally:
            _comparing.discard(pair)


def _forwarded(method: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._remote.method(method, *arguments)


def _comparison(method: str) -> Callable[..., Any]:
    """A comparison by size, only between two objects of the solution."""

    def compare(self: RemoteObject, other: object) -> Any:
        if not isinstance(other, RemoteObject) or method not in self._remote.specials:
            return NotImplemented
        if self._remote.has_met_value or other._remote.has_met_value:
            return NotImplemented
        return self._remote.method(method, other)

    return compare


def _operation(method: str) -> Callable[..., Any]:
    """An operator.

    A value of the tests may reveal the expected result (`abs(f(x) - 3) < 1e-9`). Such an operation
    returns only another object, which cannot be compared by size or converted to a value. Between
    two objects of the solution it may return a value, such as a length.
    """

    def operate(self: RemoteObject, *other: object) -> Any:
        if method not in self._remote.specials:
            return NotImplemented
        made = self._remote.method(method, *other)
        records = [one._remote for one in other if issubclass(type(one), RemoteObject)]
        has_met_value = len(records) < len(other) and method not in _GATHERING
        has_met_value |= any(one.has_met_value for one in [self._remote, *records])
        if issubclass(type(made), RemoteObject):
            made._remote.has_met_value |= has_met_value
            if has_met_value:
                made._remote.met_kinds |= self._remote.met_kinds.union(*map(_kinds_of, other))
        elif has_met_value or len(records) < len(other):
            raise TypeError(f"{method} of {self._remote.name!r} does not return a new object")
        return made

    return operate


def _kinds_of(value: Any) -> set[type]:
    """Kinds of the difference between a right result and a value of the tests.

    Not those of plain numbers and texts: a solution may well have its own kind of fraction.
    """
    if issubclass(type(value), RemoteObject):
        return value._remote.met_kinds
    loaded = (("numpy", "ndarray"), ("sympy", "Expr"), ("sympy", "MatrixBase"))
    found = {getattr(sys.modules[module], kind) for module, kind in loaded if module in sys.modules}
    if type(value) is complex or type(value).__module__ in ("decimal", "_decimal"):
        found.add(type(value))
    if type(value).__module__ == "datetime":
        found.add(sys.modules["datetime"].timedelta)
    return found


def _define(methods: list[str], maker: Callable[[str], Callable[..., Any]]) -> None:
    for method in methods:
        setattr(RemoteObject, method, maker(method))


_define(_FORWARDED, _forwarded)
_define(SPECIAL[SPECIAL.index("__lt__") : SPECIAL.index("__add__")], _comparison)
_define(SPECIAL[SPECIAL.index("__add__") :], _operation)


class RemoteCallable(RemoteObject):
    """A function, class or callable object of the solution."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1)
        # A statement that calls and reads the argument means the value before the call.
        is_read = caller.f_lineno in self._remote.link.reading_lines
        is_read &= caller.f_code.co_filename == UNIT_TESTS_FILE
        return self._remote.ask("call", arguments, keywords, write_back=not is_read)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, RemoteObject) and self._remote.name in instance._remote.names

    __subclasscheck__ = __instancecheck__


def remote_generator(record: Record) -> Iterator[Any]:
    """Items of an iterator of the solution."""
    count, is_plain = 0, True
    sent, error = None, None
    while True:
        # Few round trips for many items, but no item computed early when tests take them singly.
        batch = _BATCH_ITEMS if is_plain and count >= _SINGLE_ITEMS else 1
        items, end, last = record.ask("advance", sent, error, batch)
        sent, error = None, None
        for item in items:
            count += 1
            try:
                sent = yield item
            except Exception as thrown:  # noqa: BLE001 the tests throw it into the generator
                error = thrown
            is_plain = is_plain and sent is None and error is None
            if error is not None:
                break
        else:
            if end == "raised":
                raise last
            if end == "end":
                return last


async def remote_coroutine(record: Record) -> Any:
    """Result of a coroutine of the solution."""
    return record.ask("await")


async def remote_async_generator(record: Record) -> AsyncIterator[Any]:
    """Items of an asynchronous iterator of the solution."""
    for item in record.ask("drain"):
        yield item
