"""Schemas of tools against those of transformers, and the check of arguments against jsonschema."""

import enum
from typing import Any, Literal

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from verification.environments.tool_schemas import Tool
from verification.environments.tools import tools_episode


def plain(a: int, b: float, c: str, d: bool = True) -> str:
    """Do it.

    Args:
        a: the first
            of many
        b: half (of a): more
        c: text
        d: flag
    """
    return ""


def nested(a: list[str], b: dict[str, int], c: list[list[float]], d: list, e: dict) -> None:
    """Do it.

    It takes two paragraphs to say.

    Args:
        a: texts
        b: counts
        c: rows
        d: any
        e: any too

    Returns:
        nothing: at all
    """


def chosen(
    a: Literal["x", "y"], b: Literal[1, 2] = 1, c: int | None = None, d: str | None = None
) -> None:
    """Do it.

    Args:
        a: a letter
        b: a count
        c: may miss
        d: may miss too

    Raises:
        ValueError: never
    """


def _without_unknowns(schema: Any) -> Any:
    """A schema in which {} for anything is left out, as transformers does."""
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_unknowns(value)
        for key, value in schema.items()
        if not (key in ("items", "additionalProperties") and value == {})
    }


@pytest.mark.parametrize("function", [plain, nested, chosen])
def test_the_schema_of_a_function_is_that_of_transformers(function: Any) -> None:
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert _without_unknowns(Tool(function).schema) == expected


class Colour(enum.StrEnum):
    """Colours."""

    RED = "red"


def take(a: int, b: list[int] | None = None, c: "int | str" = 1, d: Colour = Colour.RED) -> None:
    """Take."""


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"a": 1}, ""),
        ({"a": 1, "b": [2, 3], "c": "x", "d": "red"}, ""),
        ({"a": 1, "b": None}, ""),
        ({}, "take needs a"),
        ([1], "the arguments of take are no JSON object"),
        ({"a": 1, "e": 2}, "take has no argument 'e'. Arguments: a, b, c, d"),
        ({"a": "1"}, "take: a is '1', expected integer"),
        ({"a": True}, "take: a is True, expected integer"),
        ({"a": 1.0}, "take: a is 1.0, expected integer"),
        ({"a": None}, "take: a is None, expected integer"),
        ({"a": 1, "b": [2, "3"]}, "take: b[1] is '3', expected integer"),
        ({"a": 1, "c": []}, "take: c is [], expected integer"),
        ({"a": 1, "d": "blue"}, "take: d is 'blue', expected one of ['red']"),
    ],
)
def test_arguments_are_checked(arguments: Any, fault: str) -> None:
    assert Tool(take).find_fault(arguments) == fault


def paint(point: tuple[int, str], colour: Colour, edge: Colour | None = None) -> str:
    """Paint."""
    return f"{point} {colour.name} {edge and edge.name}"


def test_a_function_gets_the_members_of_its_enums_and_tuples_of_several_types() -> None:
    tool = Tool(paint)
    for arguments, result in (
        ({"point": [1, "x"], "colour": "red"}, "[1, 'x'] RED None"),
        ({"point": [1, "x"], "colour": "red", "edge": None}, "[1, 'x'] RED None"),
        ({"point": [1, "x"], "colour": "red", "edge": "red"}, "[1, 'x'] RED RED"),
    ):
        assert tool.find_fault(arguments) == ""
        assert tool.function(**arguments) == result
    assert "expected integer" in tool.find_fault({"point": [1.5], "colour": "red"})


def _undocumented(a: int) -> None:
    pass


def _untyped(a) -> None:  # noqa: ANN001
    """Do."""


def _variable(*a: int) -> None:
    """Do."""


def _unknown(a: bytes) -> None:
    """Do."""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_undocumented, "no docstring"),
        (_untyped, "no type for a"),
        (_variable, "by name"),
        (_unknown, r"_unknown\(a\) is annotated <class 'bytes'>: expected str"),
    ],
)
def test_functions_that_are_no_tools_are_refused(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    def counts(text: str) -> int:
        """Count."""
        return len(text)

    with pytest.raises(ValueError, match="several tools are called counts"):
        tools_episode([counts, counts])
