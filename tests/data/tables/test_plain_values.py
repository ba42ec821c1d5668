"""Pickles of plain values are read, and nothing in any other pickle is executed."""

import base64
import pickle
import zlib
from typing import Any

import pytest

from megatron_rl.data.tables.plain_values import BadTests, read_pickle
from megatron_rl.data.tables.test_forms import entry_of


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_plain_values_are_read_as_python_reads_them(protocol: int) -> None:
    value = [{"a": [1, -2.5, True, None, 300, 70_000, 2**70], "b": ("x", "é", "x"), "": {}}] * 1
    value += [(), (1,), (1, 2), (1, 2, 3, 4), "ü" * 300, False, [[], [[]]], ["x", "x"]]
    assert read_pickle(pickle.dumps(value, protocol)) == value


class _Hostile:
    def __reduce__(self) -> Any:
        return print, ("executed",)


SHARED: list[Any] = [1]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps(_Hostile(), 0), "opcode GLOBAL"),
        (pickle.dumps(_Hostile()), "opcode STACK_GLOBAL"),
        (pickle.dumps(b"x"), "opcode SHORT_BINBYTES"),
        (pickle.dumps({1, 2}), "opcode EMPTY_SET"),
        (pickle.dumps([SHARED, SHARED]), "repeats a value other than text"),
        (pickle.dumps({1: 2}), "damaged: only a list or a dictionary"),
        (b"\x80\x04]", "damaged"),
        (b"N" * 1_000_001 + b".", "more than 1,000,000 opcodes"),
        (b"(" * 10 + b"e.", "damaged"),
        (b"0.", "opcode POP"),
        (b"NN.", "damaged"),
        (b"I" + b"9" * 5000 + b"\n.", "damaged"),
        (b"", "damaged"),
    ],
)  # fmt: skip
def test_other_pickles_are_refused_by_name(
    data: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadTests, match=why):
        read_pickle(data)
    assert capsys.readouterr().out == ""


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.data.tables.plain_values.MAX_UNPACKED_BYTES", 10_000)
    for text in ("x" * 20_000, ["x" * 2_000] * 6):
        with pytest.raises(BadTests, match=r"unpacks? to more than 10,000"):
            entry_of(packed(text))
    with pytest.raises(BadTests, match="cut off"):
        entry_of(base64.b64encode(zlib.compress(b"x" * 100)[:-8]).decode())
