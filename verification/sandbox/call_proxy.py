"""The connection between the tests' process and the solution's process, and plain programs.

Runs inside the sandbox, in children of `server.py`. The tests' process knows the expected results
and runs no line of the solution. The solution's process sees the arguments of one call at a time.

A frame on the socket is a length and JSON. Either end may ask; while an end waits for its reply, it
answers questions of the other end.

| frame | holds |
|---|---|
| question | "op", "handle" of an object, "data": arguments |
| reply | "value", "is_raised"; to the tests also "changed" arguments |
| each frame of the solution | "printed": text of its standard output and error, if any |
"""

import importlib.util
import io
import json
import os
import struct
import sys
import types
from typing import Any

from verification.sandbox.values import Decoder, Encoder, Kind

EXIT_NO_ENTRY_POINT = 94
MAX_FRAME_BYTES = 32 << 20
MAX_PRINTED_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class SolutionGone(BaseException):
    """The solution's process ended, or sent something that is not a frame."""


class Peer:
    """One end of the connection."""

    kinds: dict[str, Kind]
    """Kinds of value that this end decodes."""
    constant: Any = float
    """Value of NaN, Infinity and -Infinity in a frame."""

    def __init__(self, connection: int) -> None:
        self._connection = connection

    def describe(self, value: Any) -> tuple[Any, ...]:
        """(tag, parts, *more) of a value that is not plain."""
        raise NotImplementedError

    def answer(self, question: dict[str, Any]) -> None:
        """Reply to a question of the other end."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """The data of a frame."""
        return Encoder(self.describe).encode(value)

    def decode(self, data: Any) -> Any:
        """The value in the data of a frame."""
        return Decoder(data, self.kinds).decode()

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        """The reply to a question; answers the other end's questions meanwhile."""
        self.send(question)
        while "op" in (frame := self.receive()):
            self.answer(frame)
        return frame

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame."""
        body = json.dumps(frame).encode()
        unsent = memoryview(_LENGTH.pack(len(body)) + body)
        while unsent:
            unsent = unsent[os.write(self._connection, unsent) :]

    def receive(self) -> dict[str, Any]:
        """Next frame; SolutionGone at the end of the connection or for a malformed frame."""
        (size,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if size > MAX_FRAME_BYTES:
            raise SolutionGone(f"a frame announces {size} bytes")
        try:
            frame = json.loads(self._receive_exactly(size), parse_constant=self.constant)
        except (ValueError, RecursionError) as error:
            raise SolutionGone(f"a frame is not valid JSON: {error}") from error
        if not isinstance(frame, dict):
            raise SolutionGone("a frame is no JSON object")
        return frame

    def _receive_exactly(self, size: int) -> bytes:
        buffer = bytearray()
        while len(buffer) < size:
            try:
                received = os.read(self._connection, min(size - len(buffer), 1 << 20))
            except OSError as error:
                raise SolutionGone(str(error)) from error
            if not received:
                raise SolutionGone("the connection ended")
            buffer += received
        return bytes(buffer)


class Printed:
    """Captures what the solution prints, for tests that read it."""

    def __init__(self) -> None:
        self._files = [_Bounded(), _Bounded()]
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                file, encoding="utf-8", errors="replace", newline="", write_through=True
            )
            for file in self._files
        )

    def take(self) -> list[str] | None:
        """Standard output and error since the last call; None if both are empty."""
        texts = [file.getvalue().decode("utf-8", "replace") for file in self._files]
        if not any(texts):
            return None
        for file in self._files:
            file.seek(0)
            file.truncate()
        return texts


class _Bounded(io.BytesIO):
    """Bytes up to a limit; OSError beyond, like a full disk."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_PRINTED_BYTES:
            raise OSError(f"more than {MAX_PRINTED_BYTES} bytes were printed")
        return super().write(data)


def read_descriptor(descriptor: int) -> bytes:
    """All bytes of a file, independent of its position."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def run_program(source: bytes) -> None:
    """Run a Python program as `__main__`."""
    module = new_module("__main__")
    sys.argv = ["solution.py"]
    exec(compiled(source), module.__dict__)


def compiled(source: bytes) -> types.CodeType:
    """Code of a solution. Raises SyntaxError."""
    if b"\0" in source:
        raise SyntaxError("source code cannot contain null bytes")
    return compile(source, "solution.py", "exec")


def new_module(name: str) -> types.ModuleType:
    """An empty module that dataclasses and type hints find by its name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


class PackageFinder:
    """Finds packages by their own folders; the parent folder may be unreadable."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = {os.path.basename(folder): folder for folder in folders}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Spec of a package, for `sys.meta_path`."""
        folder = self._folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )


def show_packages(folders: list[str]) -> None:
    """Make installed packages importable."""
    sys.meta_path.append(PackageFinder(folders))
    # One thread: a thread pool would take most of a test's memory.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
