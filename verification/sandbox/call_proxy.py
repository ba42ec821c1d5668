"""Unit tests in one process, the solution in another: function calls over a socket.

Runs inside the sandbox, in children of `server.py`. The process of the tests knows the
expected results and runs no line of the solution; the process of the solution sees the arguments
of one call at a time. What comes back is decoded into plain values, so that a solution cannot pass
by an object with an equality of its own, and it can reach neither the assertions nor the verdict.

A connection is the descriptor of a socket; a frame is a length and JSON. Lists are [tag, payload],
since JSON knows too few types.
"""

import builtins
import collections
import itertools
import json
import os
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

EXIT_PASSED = 90
EXIT_ASSERTION = 91
EXIT_SOLUTION_GONE = 92
EXIT_TESTS_BROKEN = 93
EXIT_NO_ENTRY_POINT = 94

MAX_FRAME_BYTES = 32 << 20
MAX_ITERATOR_ITEMS = 100_000
_SMALL_INT = 1 << 53
_LENGTH = struct.Struct("<I")


class SolutionGone(BaseException):
    """The solution's process ended, or sent something that is no frame."""


class Opaque:
    """A result that is no plain value: equal to nothing but itself."""


def encode(value: Any) -> Any:
    """JSON form of a plain value; ["opaque", type] for another."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_SMALL_INT < value < _SMALL_INT else ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    for kind, (tag, dump, _) in _KINDS.items():
        if isinstance(value, kind):
            return [tag, dump(value)]
    if isinstance(value, collections.abc.Iterator):
        items = list(itertools.islice(value, MAX_ITERATOR_ITEMS + 1))
        if len(items) <= MAX_ITERATOR_ITEMS:
            return ["iterator", [encode(item) for item in items]]
    return ["opaque", type(value).__name__]


def decode(data: Any) -> Any:
    """Plain value of a JSON form; SolutionGone for what `encode` does not make."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise SolutionGone("a JSON object is no value")
        return data
    if len(data) != 2 or not isinstance(data[0], str) or data[0] not in _LOADERS:
        raise SolutionGone("an unknown kind of value")
    try:
        return _LOADERS[data[0]](data[1])
    except (TypeError, ValueError, OverflowError) as error:
        raise SolutionGone(f"a malformed {data[0]}: {error}") from error


def _dump_items(values: Any) -> list[Any]:
    return [encode(value) for value in values]


def _dump_dict(values: Any) -> list[Any]:
    return [[encode(key), encode(value)] for key, value in values.items()]


# Kind -> (tag, to JSON, from JSON).
_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    list: ("list", _dump_items, lambda data: [decode(item) for item in data]),
    tuple: ("tuple", _dump_items, lambda data: tuple(decode(item) for item in data)),
    dict: ("dict", _dump_dict, lambda data: {decode(key): decode(item) for key, item in data}),
    set: ("set", _dump_items, lambda data: {decode(item) for item in data}),
    frozenset: ("frozenset", _dump_items, lambda data: frozenset(map(decode, data))),
    collections.deque: ("deque", _dump_items, lambda data: collections.deque(map(decode, data))),
    bytes: ("bytes", lambda value: value.hex(), bytes.fromhex),
    bytearray: ("bytearray", lambda value: value.hex(), bytearray.fromhex),
    complex: ("complex", lambda value: [value.real, value.imag], lambda data: complex(*data)),
    range: (
        "range",
        lambda value: [hex(value.start), hex(value.stop), hex(value.step)],
        lambda data: range(*(int(number, 16) for number in data)),
    ),
}
_LOADERS: dict[str, Callable[[Any], Any]] = {tag: load for tag, _, load in _KINDS.values()} | {
    "int": lambda data: int(data, 16),
    "iterator": lambda data: iter([decode(item) for item in data]),
    "opaque": lambda data: Opaque(),
}


def send(connection: int, message: Any) -> None:
    """Send a frame."""
    body = json.dumps(message).encode()
    unsent = memoryview(_LENGTH.pack(len(body)) + body)
    while unsent:
        unsent = unsent[os.write(connection, unsent) :]


def receive(connection: int) -> Any:
    """Next frame; SolutionGone at the end of the connection or for what is no frame."""
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise SolutionGone(f"a frame announces {size} bytes")
    try:
        return json.loads(_receive_exactly(connection, size))
    except (ValueError, RecursionError) as error:
        raise SolutionGone(f"a frame is no JSON: {error}") from error


def _receive_exactly(connection: int, size: int) -> bytes:
    buffer = bytearray()
    while len(buffer) < size:
        try:
            received = os.read(connection, min(size - len(buffer), 1 << 20))
        except ConnectionError as error:
            raise SolutionGone(str(error)) from error
        if not received:
            raise SolutionGone("the connection ended")
        buffer += received
    return bytes(buffer)


def read_descriptor(descriptor: int) -> bytes:
    """All bytes of a file, whatever the position that its descriptor has."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def run_program(source: bytes) -> None:
    """Run a Python program as `__main__`; its exceptions pass through."""
    module = _new_module("__main__")
    sys.argv = ["solution.py"]
    exec(_compiled(source), module.__dict__)


def _compiled(source: bytes) -> types.CodeType:
    if b"\0" in source:
        raise SyntaxError("source code cannot contain null bytes")
    return compile(source, "solution.py", "exec")


def _new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    # Dataclasses and type hints look their module up by name.
    sys.modules[name] = module
    return module


def serve_calls(source: bytes, connection: int, entry_point: str) -> None:
    """The solution's process: define the solution, then answer calls until the tests end."""
    module = _new_module("solution")
    exec(_compiled(source), module.__dict__)
    function = getattr(module, entry_point, None)
    if not callable(function):
        os._exit(EXIT_NO_ENTRY_POINT)
    while True:
        try:
            arguments, keywords = decode(receive(connection))
        except SolutionGone:
            return
        before = [encode(argument) for argument in arguments]
        try:
            reply = {"value": encode(function(*arguments, **keywords))}
        except Exception as error:  # noqa: BLE001 any exception is the answer to the call
            reply = {"raised": [kind.__name__ for kind in type(error).__mro__]}
        reply["arguments"] = _changes(before, arguments)
        send(connection, reply)


def _changes(before: list[Any], arguments: Any) -> list[Any]:
    """Index and new value of the arguments that the call changed in place."""
    after = [encode(argument) for argument in arguments]
    return [[i, new] for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


class Candidate:
    """The function under test, as the tests see it: calls it in the other process."""

    def __init__(self, connection: int, name: str) -> None:
        self._connection = connection
        self.__name__ = name
        self.raised: BaseException | None = None
        """Exception that the last call raised."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        call = encode((arguments, keywords))
        try:
            send(self._connection, call)
        except ConnectionError as error:
            raise SolutionGone(str(error)) from error
        reply = receive(self._connection)
        if not isinstance(reply, dict):
            raise SolutionGone("a reply is no JSON object")
        _write_back(arguments, reply.get("arguments"))
        if "raised" in reply:
            self.raised = _exception(reply["raised"])
            raise self.raised
        return decode(reply.get("value"))


def _write_back(arguments: tuple[Any, ...], changes: Any) -> None:
    """Repeat in the tests' process what the call did to its arguments."""
    for change in changes if isinstance(changes, list) else ():
        index, value = change if isinstance(change, list) and len(change) == 2 else (None, None)
        if not isinstance(index, int) or not 0 <= index < len(arguments):
            raise SolutionGone("a change of an unknown argument")
        old, new = arguments[index], decode(value)
        if isinstance(old, list | bytearray) and isinstance(new, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set) and type(new) is type(old):
            old.clear()
            old.update(new)


def _exception(names: Any) -> Exception:
    """The nearest built-in exception of those that the solution's exception derives from."""
    for name in names if isinstance(names, list) else ():
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind("raised by the solution")
            except TypeError:
                continue
    return RuntimeError("raised by the solution")


def run_tests(tests: bytes, connection: int, entry_point: str) -> None:
    """The tests' process: run them and exit with one of the codes above.

    Any other exit is an exception in the tests, which a wrong result caused.
    """
    candidate = Candidate(connection, entry_point)
    namespace: dict[str, Any] = {"__name__": "unit_tests", entry_point: candidate}
    try:
        exec(compile(tests, "unit_tests.py", "exec"), namespace)
        # Tests may hold the prompt with a stub of the function: the name still means the solution.
        namespace[entry_point] = candidate
        if callable(namespace.get("check")):
            namespace["check"](candidate)
    except AssertionError:
        os._exit(EXIT_ASSERTION)
    except SolutionGone:
        os._exit(EXIT_SOLUTION_GONE)
    except (NameError, ImportError, SyntaxError) as error:
        if error is candidate.raised:
            os._exit(EXIT_ASSERTION)
        sys.stderr.write(f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(EXIT_TESTS_BROKEN)
    os._exit(EXIT_PASSED)
