"""The solution's process: defines the solution, then answers the tests' questions.

Runs inside the sandbox, in a child of `server.py`. Nothing here protects anything: the solution may
change everything in this process, and the tests' process accepts only values from it.
"""

import builtins
import importlib
import json
import os
import time
import types
from collections.abc import Callable
from typing import Any

from verification.sandbox.call_proxy import (
    EXIT_NO_ENTRY_POINT,
    Peer,
    Printed,
    SolutionGone,
    compiled,
    new_module,
)
from verification.sandbox.values import CHANGEABLE, Decoder, Encoder, Kind, value_kinds

CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
ENTRY, MODULE = 0, 1
"""Handles of the entry point and of the solution's module."""
BATCH_S = 0.0005
SPECIAL = (
    "__bool__ __len__ __iter__ __next__ __getitem__ __setitem__ __delitem__ __call__ __enter__ "
    "__exit__ __str__ __repr__ __format__ __int__ __float__ __index__ __round__ __eq__ __lt__ "
    "__le__ __gt__ __ge__ __add__ __sub__ __mul__ __matmul__ __truediv__ __floordiv__ __mod__ "
    "__pow__ __and__ __or__ __xor__ __lshift__ __rshift__ __radd__ __rsub__ __rmul__ __rmatmul__ "
    "__rtruediv__ __rfloordiv__ __rmod__ __rpow__ __rand__ __ror__ __rxor__ __iadd__ __isub__ "
    "__imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ __ixor__ __neg__ __pos__ "
    "__abs__ __invert__"
).split()


def serve_calls(job_json: bytes, connection: int) -> None:
    """Define the solution of a job, then answer until the tests end."""
    job = json.loads(job_json)
    module = new_module("solution")
    # Classes of the tests that the solution must know.
    exec(compiled(job["prelude"].encode()), module.__dict__)
    exec(compiled(job["source"].encode("utf-8", "surrogatepass")), module.__dict__)
    entry = _find_entry(module, job["entry_point"])
    printed = Printed() if job["captures_output"] else None
    if not callable(entry):
        os._exit(EXIT_NO_ENTRY_POINT)
    Service(connection, module, entry, printed).serve()


def _find_entry(module: types.ModuleType, path: str) -> Any:
    """The object of `name`, `Class.method` or `Class().method`; `Solution` may hold a bare name."""
    root, _, method = path.partition(".")
    found = getattr(module, root.removesuffix("()"), None)
    if found is None and not method:
        found, method = getattr(module, "Solution", None), root
    if not method or found is None:
        return found
    if not callable(getattr(found, method, None)):
        return None

    def call_method(*arguments: Any, **keywords: Any) -> Any:
        # A new object for each call, like online judges.
        return getattr(found(), method)(*arguments, **keywords)

    return call_method


class Service(Peer):
    """Answers the tests."""

    def __init__(
        self, connection: int, module: types.ModuleType, entry: Any, printed: Printed | None
    ) -> None:
        super().__init__(connection)
        self._printed = printed
        self._module = module
        self._handles: list[Any] = [entry, module]
        """Objects that the tests know, by number."""
        self._handle_of: dict[int, int] = {}
        self._passed: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        """Objects of the tests by id, each with (name, number, methods)."""
        self.kinds = value_kinds(self._own, is_trusted=True) | {
            "handle": Kind(lambda parts, handle: self._handles[handle]),
            "callback": Kind(self._make_callback),
            "global": Kind(_make_global),
            "iterator": Kind(iter),
            "exception": Kind(self._make_exception),
            "instance": Kind(self._make_instance, fill=_fill_instance),
        }

    def serve(self) -> None:
        """Answer until the tests end."""
        try:
            while True:
                self.answer(self.receive())
        except SolutionGone:
            return

    def call_back(self, number: int, method: str, arguments: Any, keywords: Any) -> Any:
        """Call a function, or a method of an object, in the tests' process."""
        data = self.encode((arguments, keywords))
        reply = self.exchange({"op": method, "handle": number, "data": data})
        value = self.decode(reply["value"])
        if reply["is_raised"]:
            raise value
        return value

    def answer(self, question: dict[str, Any]) -> None:
        arrived = Decoder(question["data"], self.kinds)
        is_raised = False
        try:
            operation = _OPERATIONS[question["op"]]
            value = operation(self._handles[question["handle"]], *arrived.decode())
            data = self.encode(value)
        except SolutionGone:
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 any exception is the answer to the call
            data, is_raised = self.encode(error), True
        reply = {"value": data, "is_raised": is_raised}
        changed = self._changes(arrived)
        self.send(reply | {"changed": changed} if changed else reply)

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame with the text printed since the last frame."""
        texts = None if self._printed is None else self._printed.take()
        super().send(frame if texts is None else frame | {"printed": texts})

    def _changes(self, arrived: Decoder) -> list[Any] | None:
        """[indices of changed nodes, nodes] of the arguments; None without a change."""
        old = arrived.nodes
        if not any(node[0] in CHANGEABLE for node in old):
            return None
        own = {id(item) for item in arrived.objects}

        def describe(value: Any) -> tuple[Any, ...]:
            if id(value) in own and id(value) in self._passed:
                state = state_of(value) or {}
                return "instance", state.values(), *self._passed[id(value)][1], list(state)
            return self.describe(value)

        new = Encoder(describe, arrived.objects).encode(None)[1]
        changed = [
            i
            for i, (was, now) in enumerate(zip(old, new, strict=False))
            if was[0] in CHANGEABLE and was != now
        ]
        if not changed:
            return None
        return [changed, [n if i in changed or i >= len(old) else 0 for i, n in enumerate(new)]]

    def describe(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if id(value) in self._passed:
            return "mine", (), self._passed[id(value)][1][1]
        if isinstance(value, BaseException):
            state = state_of(value) or {}
            parts = [*value.args, *state.values()]
            return "exception", parts, lineage(kind), _text_of(value), list(state)
        if value is NotImplemented:
            return "opaque", ()
        form = _form(value)
        name, specials, state = kind.__name__, special_methods(kind), None
        if form == "object":
            state = state_of(value)
        elif form in ("callable", "class"):
            name, specials = value.__name__, ["__call__"]
        handle = self._handle_of.setdefault(id(value), len(self._handles))
        if handle == len(self._handles):
            self._handles.append(value)
        names = lineage(value if form == "class" else kind)
        keys = None if state is None else list(state)
        return "remote", (state or {}).values(), handle, form, name, specials, names, keys

    def _own(self, name: str) -> Any:
        return getattr(self._module, name, None)

    def _make_callback(self, parts: list[Any], number: int, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.call_back(number, "", arguments, keywords)

        call.__name__ = call.__qualname__ = name
        self._passed[id(call)] = (call, (name, number, []))
        return call

    def _make_exception(self, parts: list[Any], names: Any, text: str, keys: Any) -> Any:
        for _, name in names:
            kind = getattr(builtins, name, None) or self._own(name)
            if isinstance(kind, type) and issubclass(kind, Exception):
                return kind.__new__(kind, *parts)
        return RuntimeError(text)

    def _make_instance(self, name: str, number: int, methods: Any, keys: Any) -> Any:
        kind = self._own(name)
        if not isinstance(kind, type):
            body = {method: self._method(method) for method in methods}
            kind = type(name, (), {"__init__": _set_attributes} | body)
        made = object.__new__(kind)
        if not hasattr(made, "__dict__") and not hasattr(kind, "__slots__"):
            raise TypeError(f"{name} takes no attributes")
        self._passed[id(made)] = (made, (name, number, methods))
        return made

    def _method(self, name: str) -> Callable[..., Any]:
        def call(instance: Any, *arguments: Any, **keywords: Any) -> Any:
            number = self._passed[id(instance)][1][1]
            return self.call_back(number, name, arguments, keywords)

        return call


def _form(value: Any) -> str:
    """Form of an object's proxy in the tests' process."""
    kind = type(value)
    if isinstance(value, type):
        return "class"
    if kind is types.CoroutineType or hasattr(kind, "__await__"):
        return "coroutine"
    if hasattr(kind, "__anext__"):
        return "async_generator"
    if hasattr(kind, "__next__") and kind.__module__ not in ("solution", "_io"):
        return "generator"
    return "callable" if isinstance(value, CALLABLES) else "object"


def _set_attributes(self: Any, *arguments: Any, **keywords: Any) -> None:
    self.__dict__.update(keywords)


def _fill_instance(target: Any, parts: list[Any], *more: Any) -> None:
    for name, value in zip(more[-1], parts, strict=True):
        object.__setattr__(target, name, value)


def _make_global(parts: list[Any], module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _evaluate(module: types.ModuleType, text: Any, variables: dict[str, Any]) -> Any:
    names = {name: getattr(module, name) for name in dir(module) if name[0] != "_"}
    return eval(text, names | variables)


def _copy(value: Any, is_deep: bool) -> Any:
    import copy

    return (copy.deepcopy if is_deep else copy.copy)(value)


def _advance(iterator: Any, sent: Any, error: BaseException | None, count: int) -> Any:
    """(items, "more" | "end" | "raised", value or exception of the end)."""
    items: list[Any] = []
    start_s = time.monotonic()
    while not items or (len(items) < count and time.monotonic() - start_s < BATCH_S):
        try:
            if error is not None:
                items.append(iterator.throw(error))
            else:
                items.append(next(iterator) if sent is None else iterator.send(sent))
        except StopIteration as stop:
            return items, "end", stop.value
        except BaseException as raised:  # noqa: BLE001 the tests' process raises it later
            return items, "raised", raised
    return items, "more", None


def _await(awaitable: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _drain(iterator: Any) -> Any:
    async def drain() -> Any:
        return [item async for item in iterator]

    return _await(drain())


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": lambda value: value,
    "call": lambda value, arguments, keywords: value(*arguments, **keywords),
    "method": lambda value, name, arguments: getattr(type(value), name)(value, *arguments),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "copy": _copy,
    "eval": _evaluate,
    "advance": _advance,
    "await": _await,
    "drain": _drain,
}
"""Operations that the tests may ask for."""


def lineage(kind: type) -> list[list[str]]:
    """Module and name of a class and of its bases."""
    return [[str(base.__module__), base.__name__] for base in kind.__mro__]


def state_of(value: Any) -> dict[str, Any] | None:
    """Attributes of an instance; None if it cannot have any."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = None
    for base in type(value).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            found = {} if found is None else found
            if name[:2] != "__" and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def special_methods(kind: type) -> list[str]:
    """Names in SPECIAL that a class defines itself."""
    return [
        name for name in SPECIAL if getattr(kind, name, None) is not getattr(object, name, None)
    ]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 a solution's own method
        return ""
