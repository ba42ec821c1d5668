"""Conditions on rows of a data set, such as `level in [4, 5]`, from prompts.where.

Pure. A condition is a column, an operator and a TOML value; no code is evaluated.
"""

import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import nearest
from megatron_rl.data.tables.plain_values import BadTests, read_literal

_CONDITION = re.compile(r"\s*(.+?)\s*(==|!=|<=|>=|<|>|\bnot\s+in\b|\bin\b)\s*(.+?)\s*", re.S)
_REPR = re.compile(r"\s*\{\s*'")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Condition(NamedTuple):
    """One condition; all must hold."""

    text: str
    column: str
    sign: str
    """One of == != < <= > >= in, "not in"."""
    value: Any


def check_columns(conditions: Iterable[Condition], columns: Sequence[str], place: str) -> None:
    """Raise InputError for a condition on a missing column."""
    for condition in conditions:
        # A dot may enter a structure that is JSON text in some rows alone.
        if condition.column not in columns and condition.column.split(".")[0] not in columns:
            raise InputError(
                f"prompts.where = {condition.text!r}: {place} has no column {condition.column!r}; "
                f"it has {', '.join(columns)}{nearest(condition.column, columns)}"
            )


def holds(condition: Condition, value: Any) -> bool:
    """Whether a value meets the condition. None equals no value and has no order.

    Raises InputError for values without an order.
    """
    sign, wanted = condition.sign, condition.value
    if sign in ("==", "!="):
        return _same(value, wanted) == (sign == "==")
    if sign in ("in", "not in"):
        return any(_same(value, one) for one in wanted) == (sign == "in")
    if value is None:
        return False
    try:
        return _ORDERS[sign](value, wanted)
    except TypeError as error:
        hint = describe_kinds(condition, value)
        raise InputError(
            f"prompts.where = {condition.text!r}: {error}{f'; {hint}' if hint else ''}"
        ) from error


def describe_kinds(condition: Condition, value: Any) -> str:
    """Why a text meets no condition on numbers, or a number none on texts, and the fix; else ""."""
    column, sign, given = condition.column, condition.sign, condition.value
    wanted = given if isinstance(given, list) else [given]
    if isinstance(value, str) and wanted and all(map(_is_number, wanted)):
        quoted: Any = list(map(str, wanted)) if isinstance(given, list) else str(given)
        # Texts have no order as numbers, so the wanted ones are named.
        sign, quoted = ("in", [value[:100]]) if sign in _ORDERS else (sign, quoted)
        return (
            f"the column {column!r} holds texts, as {_as_toml(value[:100])}, and the condition has "
            f"numbers. Quote the values, as in {column} {sign} {_as_toml(quoted)}"
        )
    if _is_number(value) and wanted and all(isinstance(one, str) for one in wanted):
        return (
            f"the column {column!r} holds numbers, as {value}, and the condition has texts. Write "
            "its values without quotes"
        )
    return ""


def _as_toml(value: str | list[str]) -> str:
    """JSON, whose quoted texts and lists are TOML too."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_of(fields: Mapping[str, Any], column: str) -> Any:
    """A row's value in a column; a dot enters a structure, also one written as JSON text.

    None without a value.
    """
    if column in fields:
        return fields[column]
    value: Any = fields
    for part in column.split("."):
        inner = decoded(value)
        value = inner.get(part) if isinstance(inner, Mapping) else None
    return value


def decoded(value: Any) -> Any:
    """The object that a text holds as JSON, or as repr() writes it; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        if not _REPR.match(value):
            return value
    try:
        return read_literal(value, "no literal")
    except BadTests:
        return value


def _same(value: Any, wanted: Any) -> bool:
    # In Python True == 1; the user's "level == 1" means the number.
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def parse_condition(text: str) -> Condition:
    """The condition of a text. Raises InputError."""
    found = _CONDITION.fullmatch(text)
    expected = (
        f'prompts.where = {text!r}: expected a column, one of == != < <= > >= in "not in", and a '
        'value as TOML writes it: "level in [4, 5]", "source != \'x\'"'
    )
    if found is None:
        raise InputError(expected)
    column, sign, value = found[1], " ".join(found[2].split()), found[3]
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{expected} ({value!r}: {error})") from error
    if parsed.keys() != {"value"} or (sign.endswith("in") != isinstance(parsed["value"], list)):
        raise InputError(f"{expected}; in and not in take a list, the others take none")
    return Condition(text, column, sign, parsed["value"])
