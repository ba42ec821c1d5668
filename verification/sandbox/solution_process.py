"""The solution's process: defines the solution, then answers what the tests ask of it.

Runs inside the sandbox, in a child of `server.py`. Nothing here protects anything: the solution may
change whatever it likes in this process, and the tests' process believes it nothing but values.
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
    Printed,
    SolutionGone,
    compiled,
    new_module,
    receive,
    send,
)
from verification.sandbox.decoding import Decoder
from verification.sandbox.encoding import Encoder

CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
BATCH_S = 0.0005
SPECIAL = (
    "__bool__ __len__ __iter__ __next__ __getitem__ __setitem__ __delitem__ __call__ __enter__ "
    "__exit__ __str__ __repr__ __format__ __int__ __float__ __index__ __round__ __eq__ __lt__ "
    "__le__ __gt__ __ge__ __add__ __sub__ __mul__ __matmul__ __truediv__ __floordiv__ __mod__ "
    "__pow__ __and__ __or__ __xor__ __lshift__ __rshift__ __radd__ __rsub__ __rmul__ __rmatmul__ "
    "__rtruediv__ __rfloordiv__ __rmod__ __rpow__ __rand__ __ror__ __rxor__ __iadd__ __isub__ "
    "__imul__ __itruediv__ __ifloordiv__ __imod__ __iand__ __ior__ __ixor__ __neg__ __pos__ "
    "__abs__ __invert__"
).split()  # fmt: skip
IN_PLACE = frozenset(
    "list dict set bytearray deque counter ordered defaultdict instance".split()
)  # fmt: skip


def serve_calls(job_json: bytes, connection: int) -> None:
    """Define the solution of a job, then answer until the tests end."""
    job = json.loads(job_json)
    module = new_module("solution")
    # Classes that the tests define and pass, as the problem's text would have given them.
    exec(compiled(job["prelude"].encode()), module.__dict__)
    exec(compiled(job["source"].encode("utf-8", "surrogatepass")), module.__dict__)
    entry = _find_entry(module, job["entry_point"])
    printed = Printed() if job["captures_output"] else None
    if not callable(entry):
        os._exit(EXIT_NO_ENTRY_POINT)
    Service(connection, module, entry, printed).serve()


def _find_entry(module: types.ModuleType, path: str) -> Any:
    """What `name`, `Class.method` or `Class().method` means; a bare name may be `Solution`'s."""
    root, _, method = path.partition(".")
    found = getattr(module, root.removesuffix("()"), None)
    if found is None and not method:
        found, method = getattr(module, "Solution", None), root
    if not method or found is None:
        return found
    if not callable(getattr(found, method, None)):
        return None

    def call_method(*arguments: Any, **keywords: Any) -> Any:
        # A new object for each call, as judges do.
        return getattr(found(), method)(*arguments, **keywords)

    return call_method


class Service:
    """Answers one connection."""

    def __init__(
        self, connection: int, module: types.ModuleType, entry: Any, printed: Printed | None
    ) -> None:
        self._connection = connection
        self._printed = printed
        self.module = module
        self.handles: list[Any] = [entry]
        """What the tests refer to by number; the entry point is 0."""
        self._handle_of: dict[int, int] = {}
        self.instances: dict[int, tuple[Any, list[Any]]] = {}
        """By id: objects that the tests have passed, with the start of their nodes."""

    def serve(self) -> None:
        """Answer until the tests end."""
        while True:
            try:
                request = receive(self._connection)
            except SolutionGone:
                return
            self._answer(request)

    def call_back(self, number: int, name: str, arguments: Any, keywords: Any) -> Any:
        """Call a function, or a method, of the tests' process."""
        data = Encoder(self._describe).encode((arguments, keywords))
        self._send({"callback": number, "name": name, "data": data})
        while True:
            # Meanwhile the tests may call the solution again.
            reply = receive(self._connection)
            if "op" not in reply:
                break
            self._answer(reply)
        value = Arrived(reply["data"], self).decode()
        if reply.get("raised"):
            raise value
        return value

    def _answer(self, request: dict[str, Any]) -> None:
        arrived = Arrived(request["data"], self)
        reply: dict[str, Any] = {}
        try:
            value = getattr(self, f"_do_{request['op']}")(*arrived.decode())
            reply["value"] = Encoder(self._describe).encode(value)
        except SolutionGone:
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 any exception is the answer to the call
            reply["raised"] = Encoder(self._describe).encode(error)
        changed = self._changes(arrived)
        if changed is not None:
            reply["changed"] = changed
        self._send(reply)

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message, with what was printed until then."""
        texts = None if self._printed is None else self._printed.take()
        send(self._connection, message if texts is None else message | {"printed": texts})

    def _changes(self, arrived: "Arrived") -> list[Any] | None:
        """Nodes of the arguments that the call changed, and all nodes; None for no change."""
        old = arrived.nodes
        if not any(node[0] in IN_PLACE for node in old):
            return None
        own = {id(item) for item in arrived.objects}

        def describe(encoder: Encoder, value: Any) -> list[Any]:
            if id(value) in own and id(value) in self.instances:
                start = self.instances[id(value)][1]
                return [*start, encoder.state(state_of(value) or [])]
            return self._describe(encoder, value)

        encoder = Encoder(describe)
        encoder.know(arrived.objects)
        _, new = encoder.encode(None)
        pairs = enumerate(zip(old, new, strict=False))
        changed = [i for i, (was, now) in pairs if was[0] in IN_PLACE and was != now]
        if not changed:
            return None
        return [changed, [n if i in changed or i >= len(old) else 0 for i, n in enumerate(new)]]

    def _describe(self, encoder: Encoder, value: Any) -> list[Any]:
        """Node of what is no plain value."""
        kind = type(value)
        if id(value) in self.instances:
            return ["mine", self.instances[id(value)][1][2]]
        if kind is Callback:
            return ["mine", value.number]
        if isinstance(value, BaseException):
            more = encoder.state(state_of(value) or [])
            return ["exception", lineage(kind), _text_of(value), encoder.slots(value.args), more]
        if value is NotImplemented:
            return ["opaque"]
        handle = self._handle(value)
        if isinstance(value, type):
            return ["class", handle, value.__name__, lineage(value)]
        if kind is types.CoroutineType or hasattr(kind, "__await__"):
            return ["coroutine", handle]
        if hasattr(kind, "__anext__"):
            return ["async_iterator", handle]
        if hasattr(kind, "__next__") and kind.__module__ not in ("solution", "_io"):
            return ["iterator", handle, kind is types.GeneratorType]
        if isinstance(value, CALLABLES):
            return ["callable", handle, getattr(value, "__name__", "function")]
        state = state_of(value)
        slots = None if state is None else encoder.state(state)
        return ["object", handle, kind.__name__, special_methods(kind), lineage(kind), slots]

    def _handle(self, value: Any) -> int:
        found = self._handle_of.get(id(value))
        if found is None:
            found = self._handle_of[id(value)] = len(self.handles)
            self.handles.append(value)
        return found

    def _do_call(self, handle: int, arguments: Any, keywords: Any) -> Any:
        return self.handles[handle](*arguments, **keywords)

    def _do_method(self, handle: int, name: str, arguments: Any) -> Any:
        value = self.handles[handle]
        return getattr(type(value), name)(value, *arguments)

    def _do_getattr(self, handle: int, name: str) -> Any:
        return getattr(self.handles[handle], name)

    def _do_setattr(self, handle: int, name: str, value: Any) -> None:
        setattr(self.handles[handle], name, value)

    def _do_delattr(self, handle: int, name: str) -> None:
        delattr(self.handles[handle], name)

    def _do_get(self, handle: int) -> Any:
        return self.handles[handle]

    def _do_copy(self, handle: int, is_deep: bool) -> Any:
        import copy

        return (copy.deepcopy if is_deep else copy.copy)(self.handles[handle])

    def _do_name(self, name: str) -> Any:
        return getattr(self.module, name)

    def _do_eval(self, text: Any, variables: dict[str, Any]) -> Any:
        names = {name: getattr(self.module, name) for name in dir(self.module) if name[0] != "_"}
        return eval(text, names | {"candidate": self.handles[0]} | variables)

    def _do_next(self, handle: int, sent: Any, count: int) -> Any:
        """Some items, whether the end was reached, and the value or exception of the end."""
        iterator, items = self.handles[handle], []
        start_s = time.monotonic()
        while len(items) < count and time.monotonic() - start_s < BATCH_S or not items:
            try:
                items.append(next(iterator) if sent is None else iterator.send(sent))
            except StopIteration as stop:
                return items, "end", stop.value
            except BaseException as error:  # noqa: BLE001 raised when the tests get there
                return items, "raised", error
        return items, "more", None

    def _do_throw(self, handle: int, error: BaseException) -> Any:
        try:
            return [self.handles[handle].throw(error)], "more", None
        except StopIteration as stop:
            return [], "end", stop.value

    def _do_await(self, handle: int) -> Any:
        import asyncio

        async def wait() -> Any:
            return await self.handles[handle]

        return asyncio.run(wait())

    def _do_drain(self, handle: int) -> Any:
        import asyncio

        async def drain() -> Any:
            return [item async for item in self.handles[handle]]

        return asyncio.run(drain())


class Arrived(Decoder):
    """A message of the tests."""

    def __init__(self, data: Any, service: Service) -> None:
        super().__init__(data)
        self._service = service

    def make_handle(self, number: int) -> Any:
        return self._service.handles[number]

    def make_callback(self, number: int, name: str) -> Any:
        return Callback(self._service, number, name)

    def make_global(self, module: str, name: str) -> Any:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def make_iter(self, slots: Any) -> Any:
        return iter(self.values(slots))

    def make_exception(self, names: Any, text: str, slots: Any, more: Any) -> Any:
        for _, name in names:
            kind = getattr(builtins, name, None) or getattr(self._service.module, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                return kind.__new__(kind, *self.values(slots))
        return RuntimeError(text)

    def namedtuple_class(self, name: str, fields: tuple[str, ...]) -> Any:
        own = getattr(self._service.module, name, None)
        is_same = getattr(own, "_fields", None) == fields
        return own if is_same else super().namedtuple_class(name, fields)

    def enum_class(self, name: str, mixin: str, members: list[tuple[str, Any]]) -> Any:
        own = getattr(self._service.module, name, None)
        is_same = list(getattr(own, "__members__", ())) == [member for member, _ in members]
        return own if is_same else super().enum_class(name, mixin, members)

    def shell_instance(self, name: str, number: int, methods: Any, state: Any) -> Any:
        kind = getattr(self._service.module, name, None)
        if not isinstance(kind, type):
            kind = type(name, (), {method: _remote_method(method) for method in methods})
            kind.__init__ = _set_attributes
        made = object.__new__(kind)
        if not hasattr(made, "__dict__") and not hasattr(kind, "__slots__"):
            raise TypeError(f"{name} takes no attributes")
        self._service.instances[id(made)] = (made, ["instance", name, number, methods])
        _services[id(made)] = self._service
        return made

    def fill_instance(self, target: Any, name: str, number: int, methods: Any, state: Any) -> None:
        for attribute, slot in state:
            object.__setattr__(target, attribute, self.value(slot))


_services: dict[int, Service] = {}


def _set_attributes(self: Any, *arguments: Any, **keywords: Any) -> None:
    self.__dict__.update(keywords)


def _remote_method(name: str) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        service = _services[id(self)]
        number = service.instances[id(self)][1][2]
        return service.call_back(number, name, arguments, keywords)

    return call


class Callback:
    """A function of the tests."""

    def __init__(self, service: Service, number: int, name: str) -> None:
        self._service = service
        self.number = number
        self.__name__ = self.__qualname__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._service.call_back(self.number, "", arguments, keywords)


def lineage(kind: type) -> list[list[str]]:
    """Module and name of a class and of its bases."""
    return [[str(base.__module__), base.__name__] for base in kind.__mro__]


def state_of(value: Any) -> list[tuple[str, Any]] | None:
    """Attributes of an instance; None if it has no place for any."""
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
    return None if found is None else list(found.items())


def special_methods(kind: type) -> list[str]:
    """Those of the methods that a language construct calls which a class defines itself."""
    return [
        name for name in SPECIAL if getattr(kind, name, None) is not getattr(object, name, None)
    ]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 a solution's own method
        return ""
