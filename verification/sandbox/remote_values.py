"""The tests' end of the connection: asks the solution's process, and believes it only values.

Runs inside the sandbox, in the process of the tests.
"""

import builtins
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from verification.sandbox.call_proxy import SolutionGone, receive, send
from verification.sandbox.decoding import KIND_OF_TAG, Decoder
from verification.sandbox.encoding import Encoder
from verification.sandbox.remote_objects import (
    NotANumber,
    Opaque,
    Record,
    RemoteCallable,
    RemoteObject,
    remote_async_generator,
    remote_coroutine,
    remote_generator,
)
from verification.sandbox.solution_process import CALLABLES, lineage, state_of

MAX_ITERATOR_ITEMS = 100_000
# Modules whose exceptions a solution may raise: others' mean something to a test's harness.
_EXCEPTION_MODULES = frozenset(
    "builtins decimal json.decoder _queue queue struct zlib re sre_constants copy statistics "
    "binascii csv _csv dataclasses asyncio.exceptions concurrent.futures._base fractions "
    "configparser".split()
)
# What ends a loop, a generator or the program without a word, whoever raises it.
_SILENT = frozenset({"StopIteration", "StopAsyncIteration"})
_MALFORMED = (
    ImportError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class Link:
    """The connection to the solution's process."""

    def __init__(self, connection: int, on_first_question: Callable[[], None]) -> None:
        self._connection = connection
        self._on_first_question = on_first_question
        self._lock = threading.RLock()
        self.namespace: dict[str, Any] = {}
        """Of the tests."""
        self.reading_lines: frozenset[int] = frozenset()
        self.epoch = 0
        """Grows with whatever may change objects of the solution."""
        self.questions = 0
        self.calls = 0
        """Of the solution, that were answered."""
        self.is_gone = False
        """The solution's process ended, or broke the protocol, even if the tests swallowed that."""
        self.has_failed_inside = False
        """An assertion failed in a function that the tests had passed to the solution."""
        self.raised: BaseException | None = None
        """What the last question raised."""
        self.remotes: weakref.WeakValueDictionary[Any, RemoteObject] = weakref.WeakValueDictionary()
        self._passed: list[Any] = []
        self._number_of: dict[int, int] = {}
        self.exception_classes: dict[Any, type] = {}

    def ask(self, op: str, *payload: Any, write_back: bool = True) -> Any:
        """Answer of the solution's process; raises what it says it raised."""
        with self._lock:
            encoder = Encoder(self._describe)
            data = encoder.encode(payload)
            if not self.questions:
                self._on_first_question()
            self.questions += 1
            self._send({"op": op, "data": data})
            reply = self._reply()
            if op != "get":
                self.epoch += 1
            try:
                if write_back and "changed" in reply:
                    self._write_back(encoder, reply["changed"])
                is_raised = "raised" in reply
                value = Result(reply["raised" if is_raised else "value"], self).decode()
            except _MALFORMED as error:
                self._lose(f"a malformed answer: {error}", error)
            self.calls += op in ("call", "eval")
            if is_raised:
                self.raised = value if isinstance(value, Exception) else RuntimeError("raised")
                raise self.raised
            return value

    def own_class(self, name: str) -> type | None:
        """The class of that name that the tests define."""
        found = self.namespace.get(name)
        # By type(), since isinstance asks a remote object for its class, which leads here again.
        is_own = issubclass(type(found), type) and found.__module__ == "__main__"
        return found if is_own else None

    def _lose(self, why: str, cause: BaseException | None = None) -> None:
        self.is_gone = True
        raise SolutionGone(why) from cause

    def _send(self, message: dict[str, Any]) -> None:
        if self.is_gone:
            raise SolutionGone("the solution has ended")
        try:
            send(self._connection, message)
        except OSError as error:
            self._lose(str(error), error)

    def _reply(self) -> dict[str, Any]:
        while True:
            try:
                message = receive(self._connection)
            except SolutionGone:
                self.is_gone = True
                raise
            if "printed" in message:
                self._show(message["printed"])
            if "callback" not in message:
                return message
            self._call_back(message)

    def _show(self, texts: Any) -> None:
        """Print what the solution printed where the tests have put an output of their own.

        It is text and nothing else: the tests' own report goes another way.
        """
        if not isinstance(texts, list) or [type(text) for text in texts] != [str, str]:
            self._lose("a malformed text was printed")
        streams = ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__))
        for text, (stream, own) in zip(texts, streams, strict=True):
            if text and stream is not own:
                stream.write(text)

    def _call_back(self, message: dict[str, Any]) -> None:
        """Call a function of the tests for the solution."""
        self.epoch += 1
        try:
            name = message["name"]
            function = self._passed[message["callback"]]
            if name:
                if name not in _methods(type(function)):
                    raise AttributeError(name)
                function = getattr(function, name)
            arguments, keywords = Result(message["data"], self).decode()
        except _MALFORMED as error:
            self._lose(f"a malformed call: {error}", error)
        reply: dict[str, Any] = {"raised": False}
        try:
            value = function(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001 the solution gets what its call raised
            self.has_failed_inside |= isinstance(error, AssertionError)
            reply["raised"], value = True, error
        reply["data"] = Encoder(self._describe).encode(value)
        self._send(reply)

    def _write_back(self, encoder: Encoder, changed: Any) -> None:
        """Repeat here what a call did to its arguments."""
        indices, nodes = changed
        known = encoder.objects
        result = Result([None, nodes], self, known)
        result.decode()
        for index in indices:
            # Only what was sent as something that can change, and as the same kind of thing.
            tag = nodes[index][0]
            if index >= len(known) or encoder.nodes[index][0] != tag:
                continue
            if tag == "instance" or isinstance(known[index], KIND_OF_TAG.get(tag, ())):
                result.fill(index, known[index])

    def passed(self, number: int) -> Any:
        """What the tests have passed under that number."""
        if not 0 <= number < len(self._passed):
            raise LookupError("nothing was passed under this number")
        return self._passed[number]

    def _number(self, value: Any) -> int:
        found = self._number_of.get(id(value))
        if found is None:
            found = self._number_of[id(value)] = len(self._passed)
            self._passed.append(value)
        return found

    def _describe(self, encoder: Encoder, value: Any) -> list[Any]:
        """Node of what is no plain value."""
        kind = type(value)
        if issubclass(kind, RemoteObject):
            return ["handle", value._remote.handle]
        if issubclass(kind, BaseException):
            return ["exception", lineage(kind), str(value), encoder.slots(value.args), []]
        if _is_global(value):
            return ["global", value.__module__ or "builtins", value.__qualname__]
        if isinstance(value, (*CALLABLES, type)):
            return ["callback", self._number(value), getattr(value, "__name__", "function")]
        if hasattr(kind, "__next__"):
            items = []
            for item in value:
                items.append(item)
                if len(items) > MAX_ITERATOR_ITEMS:
                    raise TypeError("an endless iterator cannot be passed to the solution")
            return ["iter", encoder.slots(items)]
        state = state_of(value)
        if state is not None and kind.__module__ == "__main__":
            start = ["instance", kind.__name__, self._number(value), _methods(kind)]
            return [*start, encoder.state(state)]
        if callable(value):
            return ["callback", self._number(value), "function"]
        raise TypeError(f"{kind.__name__} cannot be passed to the solution")


def _methods(kind: type) -> list[str]:
    """Methods of a class of the tests that the solution may call."""
    return [name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))]


def _is_global(value: Any) -> bool:
    """Whether a function or class is the standard library's, by the name that it bears."""
    module = sys.modules.get(getattr(value, "__module__", None) or "builtins")
    name = getattr(value, "__qualname__", "")
    if module is None or module.__name__.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return module.__name__ != "__main__" and getattr(module, name, None) is value


class Result(Decoder):
    """A message of the solution's process."""

    def __init__(self, data: Any, link: Link, known: Any = ()) -> None:
        super().__init__(data, known)
        self._link = link

    def value(self, slot: Any) -> Any:
        return NotANumber("nan") if slot != slot else super().value(slot)

    def make_plain(self, value: Any) -> Any:  # type: ignore[override]
        return self.value(value) if isinstance(value, int | float | str | None) else Opaque()

    def make_opaque(self) -> Any:
        return Opaque()

    def make_mine(self, number: int) -> Any:
        return self._link.passed(number)

    def make_callable(self, handle: int, name: str) -> Any:
        return self._remote(handle, name, ["__call__"], [])

    def make_class(self, handle: int, name: str, names: Any) -> Any:
        if any(base == "BaseException" for _, base in names):
            return exception_class(self._link, names)
        return self._remote(handle, name, ["__call__"], [["solution", name], *names])

    def shell_object(self, handle: int, name: str, specials: Any, names: Any, state: Any) -> Any:
        return self._remote(handle, name, specials, names)

    def fill_object(
        self, target: Any, handle: int, name: str, specials: Any, names: Any, state: Any
    ) -> None:
        record = target._remote
        record.epoch = self._link.epoch
        record.state = None if state is None else {key: self.value(slot) for key, slot in state}

    def _remote(self, handle: int, name: str, specials: Any, names: Any) -> RemoteObject:
        key = (handle, name)
        found = self._link.remotes.get(key)
        if found is None:
            if type(handle) is not int:
                raise TypeError("a handle is a number")
            record = Record(self._link, handle, name, specials=specials, names=names)
            base = RemoteCallable if "__call__" in record.specials else RemoteObject
            # With the class of its own name, as messages and type() show it.
            found = type(name, (base,), {"__slots__": ()})(record)
            self._link.remotes[key] = found
        return found

    def make_iterator(self, handle: int, is_generator: bool) -> Any:
        return remote_generator(self._link, handle)

    def make_coroutine(self, handle: int) -> Any:
        return remote_coroutine(self._link, handle)

    def make_async_iterator(self, handle: int) -> Any:
        return remote_async_generator(self._link, handle)

    def fill_instance(self, target: Any, name: str, number: int, methods: Any, state: Any) -> None:
        for attribute, slot in state:
            # A method of the tests' own is not the solution's to replace.
            if attribute[:2] != "__" and not callable(getattr(type(target), attribute, None)):
                object.__setattr__(target, attribute, self.value(slot))

    def make_exception(self, names: Any, text: str, slots: Any, more: Any) -> Any:
        kind = exception_class(self._link, names)
        arguments = self.values(slots)
        if kind is RuntimeError and names[0][1] != "RuntimeError":
            error = RuntimeError(f"the solution raised {names[0][1]}: {text}")
            error.silent_names = [name for _, name in names]
            error.code = arguments[0] if arguments else None
            return error
        try:
            error = kind(*arguments) if kind.__module__ == "builtins" else None
        except TypeError:
            error = None
        if error is None:
            error = kind.__new__(kind, *arguments)
            error.args = tuple(arguments)
        if kind.__module__ != "builtins":
            error.__dict__.update({key: self.value(slot) for key, slot in more})
            error.__dict__["_remote_text"] = text
        return error

    def namedtuple_class(self, name: str, fields: tuple[str, ...]) -> Any:
        own = self._link.namespace.get(name)
        if issubclass(type(own), type) and getattr(own, "_fields", None) == fields:
            return own
        return super().namedtuple_class(name, fields)

    def enum_class(self, name: str, mixin: str, members: list[tuple[str, Any]]) -> Any:
        import enum

        if any(member[:1] == "_" for member, _ in members):
            # Enumerations give such names a meaning.
            raise TypeError("no names of members")
        own = self._link.own_class(name)
        if isinstance(own, enum.EnumMeta):
            values = {key: item.value for key, item in own.__members__.items()}
            if values == dict(members):
                return own
        key = ("enum", name, mixin, repr(members))
        if key not in self._link.exception_classes:
            self._link.exception_classes[key] = super().enum_class(name, mixin, members)
        return self._link.exception_classes[key]


def exception_class(link: Link, names: Any) -> type:
    """Class of the tests, of Python, or a new one, for an exception of the solution.

    Whatever ends a loop or a program in silence becomes a RuntimeError, as PEP 479 has it for
    generators.
    """
    bases = [name for _, name in names[:50]]
    if "Exception" not in bases or _SILENT & set(bases):
        return RuntimeError
    module, name = names[0]
    if module in _EXCEPTION_MODULES:
        found = getattr(sys.modules.get(module, builtins), name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    own = link.own_class(name)
    if own is not None and issubclass(own, Exception):
        return own
    key = tuple(map(tuple, names[:50]))
    if key not in link.exception_classes:
        base = exception_class(link, names[1:50])
        body = {"__str__": _text_of_exception, "__module__": "solution"}
        link.exception_classes[key] = type(name, (base,), body)
    return link.exception_classes[key]


def _text_of_exception(self: BaseException) -> str:
    text = self.__dict__.get("_remote_text")
    return text if isinstance(text, str) else str(self.args[0] if self.args else "")


class SolutionModule(types.ModuleType):
    """The module that tests import the solution from."""

    def __init__(self, name: str, link: Link, own: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(own, _link=link, __path__=[], __all__=list(own))

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self.__dict__["_link"].ask("name", name)
