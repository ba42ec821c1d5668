"""Plain values in columns: JSON with integers of any size, Python literals, packed pickles.

Pure. A data set may be hostile: a pickle is read by an interpreter of a few opcodes, which makes
plain values and can execute nothing.
"""

import ast
import base64
import json
import pickletools
import warnings
import zlib
from typing import Any

from megatron_rl.data.tables.data_sets import NoAnswer
from verification.code.functional import MAX_DIGITS

MAX_UNPACKED_BYTES = 256 << 20
_MAX_OPCODES = 1_000_000
_MAX_LITERAL = 4 << 20
_PYTHON_DIGITS = 4000
"""Python makes no integer of much longer text."""


class BadTests(NoAnswer):
    """Tests of a program that can grade nothing."""


class LongInteger:
    """An integer that stays text."""

    def __init__(self, digits: str) -> None:
        if len(digits) > MAX_DIGITS:
            raise BadTests(f"an integer has {len(digits):,} digits, allowed are {MAX_DIGITS:,}")
        self.digits = digits

    def __str__(self) -> str:
        return self.digits


def read_json(text: str) -> Any:
    """The value of JSON text; long integers are LongInteger. Raises ValueError, BadTests."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python refuses integers beyond 4,300 digits.
        return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | LongInteger:
    return int(digits) if len(digits) <= _PYTHON_DIGITS else LongInteger(digits)


def read_literal(text: str, fault: str) -> Any:
    """The value of a Python literal, as repr() writes it; nothing is executed.

    Raises BadTests with the text `fault` for any other text.
    """
    # The syntax tree takes some hundred bytes for each character.
    if len(text) > _MAX_LITERAL:
        raise BadTests(fault)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise BadTests(fault) from error


def as_json(value: Any) -> str:
    """JSON text of a value that `read_json` made. Raises BadTests."""
    try:
        return json.dumps(value)
    except TypeError:
        return _as_json(value)


def _as_json(value: Any) -> str:
    if isinstance(value, LongInteger):
        return value.digits
    if isinstance(value, list):
        return f"[{', '.join(map(_as_json, value))}]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(key))}: {_as_json(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    try:
        return json.dumps(value)
    except TypeError as error:
        raise BadTests(f"the tests hold a {type(value).__name__}, which JSON lacks") from error


# --- packed values --------------------------------------------------------------------------------


def unpack(text: str) -> Any:
    """The value in base64 of a zlib stream of a pickle (LiveCodeBench). Raises BadTests."""
    try:
        packed = base64.b64decode(text.strip(), validate=True)
        stream = zlib.decompressobj()
        data = stream.decompress(packed, MAX_UNPACKED_BYTES)
    except (ValueError, zlib.error) as error:
        raise BadTests(f"the tests are neither JSON nor packed: {error}") from error
    if not stream.eof:
        why = "is cut off" if not stream.unconsumed_tail else (
            f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes"
        )  # fmt: skip
        raise BadTests(f"the zlib stream of the tests {why}")
    return read_pickle(data)


def read_pickle(data: bytes) -> Any:
    """The plain value of a pickle: text, numbers, lists, dictionaries, tuples. Raises BadTests."""
    reader = _PickleReader()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number == _MAX_OPCODES:
                raise BadTests(f"the pickle of the tests has more than {_MAX_OPCODES:,} opcodes")
            reader.step(opcode.name, argument)
        return reader.result()
    except BadTests:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise BadTests(f"the pickle of the tests is damaged: {error}") from error


class _PickleReader:
    """Interprets opcodes; a name that `step` does not know is refused."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Heights of the stack."""
        self._memo: dict[int, Any] = {}
        self._left = MAX_UNPACKED_BYTES
        """Characters that texts may still have: a memo could repeat one without end."""

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        stack = self._stack
        if name in ("PROTO", "FRAME", "STOP"):
            return
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NUMBERS:
            stack.append(argument)
        elif name in _TEXTS:
            self._push_text(argument)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _PUTS:
            number = len(self._memo) if argument is None else argument
            self._memo[number] = stack[-1]
        elif name in _GETS:
            if not isinstance(self._memo[argument], str):
                raise BadTests(f"the pickle of the tests repeats a value other than text ({name})")
            self._push_text(self._memo[argument])
        elif name in _SIZES:
            items = stack[-_SIZES[name] :]
            del stack[-_SIZES[name] :]
            stack.append(tuple(items))
        elif name in _FROM_MARK:
            self._collect(_FROM_MARK[name])
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            _extend(stack[-1], items)
        else:
            raise BadTests(
                f"the pickle of the tests has the opcode {name}, which is no plain value: pickles "
                "are not executed, so save the tests as JSON"
            )

    def result(self) -> Any:
        """The only value left."""
        [value] = self._stack
        return value

    def _push_text(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise BadTests(f"the tests unpack to more than {MAX_UNPACKED_BYTES:,} characters")
        self._stack.append(text)

    def _collect(self, kind: type | None) -> None:
        """Make a value of what lies above the mark; None: add it to the value below."""
        stack, place = self._stack, self._marks.pop()
        items = stack[place:]
        del stack[place:]
        if kind is tuple:
            stack.append(tuple(items))
            return
        if kind is not None:
            stack.append(kind())
        _extend(stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target += items
    elif isinstance(target, dict) and all(isinstance(key, str) for key in items[::2]):
        target |= dict(zip(items[::2], items[1::2], strict=True))
    else:
        raise ValueError("only a list or a dictionary with text as keys takes items")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = frozenset("INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT".split())
_TEXTS = frozenset("UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split())
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_PUTS = frozenset("PUT BINPUT LONG_BINPUT MEMOIZE".split())
_GETS = frozenset("GET BINGET LONG_BINGET".split())
_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FROM_MARK: dict[str, type | None] = {
    "LIST": list, "DICT": dict, "TUPLE": tuple, "APPENDS": None, "SETITEMS": None,
}  # fmt: skip
