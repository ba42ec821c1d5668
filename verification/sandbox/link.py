"""The tests' end of the connection: asks the solution's process and accepts only values from it.

Runs inside the sandbox, in the tests' process.
"""

import builtins
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from verification.sandbox.call_proxy import Peer, SolutionGone
from verification.sandbox.not_a_number import NotANumber
from verification.sandbox.remote_objects import (
    Record,
    RemoteCallable,
    RemoteObject,
    remote_async_generator,
    remote_coroutine,
    remote_generator,
)
from verification.sandbox.solution_process import CALLABLES, MODULE, lineage, state_of
from verification.sandbox.values import CHANGEABLE, Decoder, Encoder, Kind, value_kinds

MAX_ITERATOR_ITEMS = 100_000
# Modules whose exceptions a solution may raise: other exceptions control a test harness.
_EXCEPTION_MODULES = frozenset(
    "builtins decimal json.decoder _queue queue struct zlib re sre_constants copy statistics "
    "binascii csv _csv dataclasses asyncio.exceptions concurrent.futures._base fractions "
    "configparser".split()
)
# These exceptions silently end a loop or a generator.
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
_GENERATORS: dict[str, Callable[[Record], Any]] = {
    "generator": remote_generator,
    "coroutine": remote_coroutine,
    "async_generator": remote_async_generator,
}


class Link(Peer):
    """The connection to the solution's process."""

    def __init__(self, connection: int, on_first_question: Callable[[], None]) -> None:
        super().__init__(connection)
        self._on_first_question = on_first_question
        self._lock = threading.RLock()
        self.namespace: dict[str, Any] = {}
        """Names of the tests."""
        self.reading_lines: frozenset[int] = frozenset()
        self.takes_nan = False
        """The tests deal with NaN by themselves."""
        self.knows_classes = False
        """The tests use a class of the solution, by its name."""
        self.epoch = 0
        """Grows with each operation that may change objects of the solution."""
        self.questions = 0
        self.calls = 0
        """Answered calls of the solution."""
        self.is_gone = False
        """The solution's process ended or broke the protocol; tests may swallow the exception."""
        self.has_failed_inside = False
        """An assertion failed in a function that the tests passed to the solution."""
        self._remotes: weakref.WeakValueDictionary[Any, RemoteObject] = (
            weakref.WeakValueDictionary()
        )
        self._passed: list[Any] = []
        self._number_of: dict[int, int] = {}
        self._exception_classes: dict[Any, type] = {}
        self.kinds = value_kinds(self.own_class, is_trusted=False) | {
            "mine": Kind(lambda parts, number: self._own_object(number)),
            "exception": Kind(self._make_exception),
            "remote": Kind(self.make_remote, fill=self._fill_remote),
            # Only to write back: the solution makes no new instances.
            "instance": Kind(_refuse_instance, fill=self._fill_instance),
        }

    def constant(self, text: str) -> float:
        is_refused = text == "NaN" and not self.takes_nan
        return NotANumber("nan") if is_refused else float(text)

    def ask(self, op: str, handle: int, *payload: Any, write_back: bool = True) -> Any:
        """Answer of the solution's process; raises the exception that it reports."""
        with self._lock:
            encoder = Encoder(self.describe)
            data = encoder.encode(payload)
            if not self.questions:
                self._on_first_question()
            self.questions += 1
            reply = self.exchange({"op": op, "handle": handle, "data": data})
            self.epoch += op != "get"
            try:
                if write_back and "changed" in reply:
                    self._write_back(encoder, *reply["changed"])
                value, is_raised = self.decode(reply["value"]), reply["is_raised"]
            except _MALFORMED as error:
                self._lose(f"a malformed answer: {error}", error)
            self.calls += op in ("call", "eval")
            if is_raised:
                raise value if isinstance(value, Exception) else RuntimeError("raised")
            return value

    def look_up(self, name: str) -> Any:
        """The solution's definition of a name."""
        self.knows_classes |= name[:1].isupper()
        return self.ask("getattr", MODULE, name)

    def own_class(self, name: str) -> type | None:
        """The tests' class of that name; None without one."""
        found = self.namespace.get(name)
        # By type(): isinstance asks a remote object for its class, which calls this method again.
        is_own = issubclass(type(found), type) and found.__module__ == "__main__"
        return found if is_own else None

    def _lose(self, why: str, cause: BaseException | None = None) -> Any:
        self.is_gone = True
        raise SolutionGone(why) from cause

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame. Raises SolutionGone if the other end is closed."""
        if self.is_gone:
            raise SolutionGone("the solution has ended")
        try:
            super().send(frame)
        except OSError as error:
            self._lose(str(error), error)

    def receive(self) -> dict[str, Any]:
        """Next frame; passes on what the solution printed before it."""
        try:
            frame = super().receive()
        except SolutionGone:
            self.is_gone = True
            raise
        if "printed" in frame:
            self._show(frame["printed"])
        return frame

    def _show(self, texts: Any) -> None:
        """Print the solution's text where the tests replaced standard output or error.

        The text cannot reach the tests' report, which is another file.
        """
        if not isinstance(texts, list) or [type(text) for text in texts] != [str, str]:
            self._lose("a malformed text was printed")
        streams = ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__))
        for text, (stream, own) in zip(texts, streams, strict=True):
            if text and stream is not own:
                stream.write(text)

    def answer(self, question: dict[str, Any]) -> None:
        """Call a function of the tests, or the method `op` of an object, for the solution."""
        self.epoch += 1
        try:
            method = question["op"]
            function = self._own_object(question["handle"])
            if method:
                if method not in _methods(type(function)):
                    raise AttributeError(method)
                function = getattr(function, method)
            arguments, keywords = self.decode(question["data"])
        except _MALFORMED as error:
            self._lose(f"a malformed call: {error}", error)
        is_raised = False
        try:
            value = function(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001 the solution gets what its call raised
            self.has_failed_inside |= isinstance(error, AssertionError)
            is_raised, value = True, error
        self.send({"value": self.encode(value), "is_raised": is_raised})

    def _write_back(self, encoder: Encoder, indices: Any, nodes: Any) -> None:
        """Repeat a call's changes of its arguments."""
        known = encoder.objects
        decoder = Decoder([None, nodes], self.kinds, known)
        decoder.decode()
        for index in indices:
            # Only values that were sent as changeable, and that keep their kind.
            tag = nodes[index][0]
            if index < len(known) and encoder.nodes[index][0] == tag and tag in CHANGEABLE:
                decoder.fill(index, known[index])

    def _own_object(self, number: int) -> Any:
        """The object that the tests passed under that number."""
        if not 0 <= number < len(self._passed):
            raise LookupError("nothing was passed under this number")
        return self._passed[number]

    def _number(self, value: Any) -> int:
        number = self._number_of.setdefault(id(value), len(self._passed))
        if number == len(self._passed):
            self._passed.append(value)
        return number

    def describe(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if issubclass(kind, RemoteObject):
            return "handle", (), value._remote.handle
        if issubclass(kind, BaseException):
            return "exception", value.args, lineage(kind), str(value), []
        if _is_global(value):
            return "global", (), value.__module__ or "builtins", value.__qualname__
        if isinstance(value, (*CALLABLES, type)):
            return "callback", (), self._number(value), getattr(value, "__name__", "function")
        if hasattr(kind, "__next__"):
            items = []
            for item in value:
                items.append(item)
                if len(items) > MAX_ITERATOR_ITEMS:
                    raise TypeError("an endless iterator cannot be passed to the solution")
            return "iterator", items
        state = state_of(value)
        if state is not None and kind.__module__ == "__main__":
            start = (kind.__name__, self._number(value), _methods(kind))
            return "instance", state.values(), *start, list(state)
        if callable(value):
            return "callback", (), self._number(value), "function"
        raise TypeError(f"{kind.__name__} cannot be passed to the solution")

    def make_remote(
        self, handle: Any, form: str, name: str, specials: Any, names: Any, keys: Any
    ) -> Any:
        """The proxy of an object of the solution."""
        if form == "class" and any(base == "BaseException" for _, base in names):
            return self._exception_class(names)
        if type(handle) is not int:
            raise TypeError("a handle is a number")
        record = Record(self, handle, name, specials=specials, names=names)
        if form in _GENERATORS:
            return _GENERATORS[form](record)
        found = self._remotes.get((handle, name))
        if found is None:
            base = RemoteCallable if "__call__" in record.specials else RemoteObject
            # A class of the object's own class name, which messages and type() show.
            found = type(name, (base,), {"__slots__": ()})(record)
            self._remotes[handle, name] = found
        return found

    def _fill_remote(self, target: Any, parts: list[Any], *more: Any) -> None:
        if issubclass(type(target), RemoteObject):
            keys, record = more[-1], target._remote
            record.epoch = self.epoch
            record.state = None if keys is None else dict(zip(keys, parts, strict=True))

    def _fill_instance(self, target: Any, parts: list[Any], *more: Any) -> None:
        for name, value in zip(more[-1], parts, strict=True):
            # The solution must not replace the tests' methods.
            if name[:2] != "__" and not callable(getattr(type(target), name, None)):
                object.__setattr__(target, name, value)

    def _make_exception(self, parts: list[Any], names: Any, text: str, keys: Any) -> Any:
        kind = self._exception_class(names)
        count = len(parts) - len(keys)
        arguments, state = parts[:count], dict(zip(keys, parts[count:], strict=True))
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
            error.__dict__.update(state, _remote_text=text)
        return error

    def _exception_class(self, names: Any) -> type:
        """Class for an exception of the solution: Python's, the tests', or a new one.

        Exceptions that silently end a loop or a program become RuntimeError, like StopIteration in
        generators (PEP 479).
        """
        bases = [name for _, name in names[:50]]
        if "Exception" not in bases or _SILENT & set(bases):
            return RuntimeError
        module, name = names[0]
        if module in _EXCEPTION_MODULES:
            found = getattr(sys.modules.get(module, builtins), name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        own = self.own_class(name)
        if own is not None and issubclass(own, Exception):
            return own
        key = tuple(map(tuple, names[:50]))
        if key not in self._exception_classes:
            base = self._exception_class(names[1:50])
            body = {"__str__": _text_of_exception, "__module__": "solution"}
            self._exception_classes[key] = type(name, (base,), body)
        return self._exception_classes[key]


def _methods(kind: type) -> list[str]:
    """Methods of a tests' class that the solution may call."""
    return [name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))]


def _is_global(value: Any) -> bool:
    """Whether a function or class is the standard library's under its own name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "builtins")
    name = getattr(value, "__qualname__", "")
    if module is None or module.__name__.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return module.__name__ != "__main__" and getattr(module, name, None) is value


def _refuse_instance(*more: Any) -> Any:
    raise TypeError("an instance of a class of the tests that they did not pass")


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
        return self.__dict__["_link"].look_up(name)
