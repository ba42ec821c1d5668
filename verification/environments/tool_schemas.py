"""A function as a tool: its JSON schema, from signature and docstring, and a check of arguments.

The schemas are those of transformers' `get_json_schema`, without the type of what is returned.

Runs in the environment's process; standard library only.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_UNIONS = (Union, getattr(types, "UnionType", Union))
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class Tool:
    """A function that the policy may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError for a function without docstring or with an unfit argument."""
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        description, texts = _read_docstring(inspect.getdoc(function) or "")
        if not description:
            raise TypeError(f"the tool {self.name} has no docstring: say what it does in one")
        hints = typing.get_type_hints(function)
        self._properties: dict[str, dict[str, Any]] = {}
        self._required: list[str] = []
        enums: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"the tool {self.name} has {parameter}: take arguments by name")
            if name not in hints:
                raise TypeError(f"the tool {self.name} has no type for {name}: annotate it")
            schema = _schema(hints[name], f"{self.name}({name})")
            if name in texts:
                schema["description"] = texts[name]
            self._properties[name] = schema
            enums.update((name, one) for one in _without_none(hints[name]) if _is_text_enum(one))
            if parameter.default is parameter.empty:
                self._required.append(name)
        if enums:
            self.function = lambda **given: function(**_with_members(given, enums))
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": description,
                "parameters": {
                    "type": "object", "properties": self._properties, "required": self._required,
                },
            },
        }  # fmt: skip

    def find_fault(self, arguments: Any) -> str:
        """What is wrong with arguments, for the policy; "" if nothing is."""
        if not isinstance(arguments, dict):
            return f"the arguments of {self.name} are no JSON object"
        for name, value in arguments.items():
            if name not in self._properties:
                names = ", ".join(self._properties)
                return f"{self.name} has no argument {name!r}. Arguments: {names}"
            fault = _find_fault(value, self._properties[name], name)
            if fault:
                return f"{self.name}: {fault}"
        missing = [name for name in self._required if name not in arguments]
        return f"{self.name} needs {', '.join(missing)}" if missing else ""


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(description, text per argument) of a docstring in Google's style."""
    description: list[str] = []
    texts: dict[str, str] = {}
    section, indent, last = "", "", ""
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header:
            section, indent, last = header[1], "", ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            found = _ARGUMENT.match(line)
            if found and found[1] == (indent or found[1]):
                indent, last = found[1], found[2]
                texts[last] = found[3].strip()
            elif last:
                texts[last] += " " + line.strip()
    return "\n".join(description).strip(), texts


def _without_none(hint: Any) -> list[Any]:
    """The only type that an annotation has beside None; [] for a union of others."""
    options = get_args(hint) if get_origin(hint) in _UNIONS else (hint,)
    found = [one for one in options if one is not type(None)]
    return found if len(found) == 1 else []


def _is_text_enum(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, enum.Enum) and issubclass(hint, str)


def _with_members(given: dict[str, Any], enums: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with members of enums in place of their values."""
    return {
        name: enums[name](value) if name in enums and value is not None else value
        for name, value in given.items()
    }


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """JSON schema of a type annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal:
        kinds = {_TYPES.get(type(argument)) for argument in arguments}
        typed = {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}
        return {**typed, "enum": list(arguments)}
    if _is_text_enum(hint):
        return {"type": "string", "enum": [member.value for member in hint]}
    if origin in _UNIONS:
        options = [_schema(each, where) for each in arguments if each is not type(None)]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        return schema if len(options) == len(arguments) else {**schema, "nullable": True}
    if hint in (list, tuple) or origin in (list, tuple):
        element = [argument for argument in arguments if argument is not Ellipsis]
        # The elements of a tuple may have several types.
        items = _schema(Union[tuple(element)], where) if element else {}  # noqa: UP007
        return {"type": "array", "items": items}
    if hint is dict or origin is dict:
        values = _schema(arguments[1], where) if arguments else {}
        return {"type": "object", "additionalProperties": values}
    if hasattr(hint, "__required_keys__"):  # A TypedDict.
        members = typing.get_type_hints(hint)
        return {
            "type": "object",
            "properties": {name: _schema(member, where) for name, member in members.items()},
            "required": sorted(hint.__required_keys__),
        }
    raise TypeError(
        f"{where} is annotated {hint}: expected str, int, float, bool, list, dict, Literal, "
        "a TypedDict, or a union of them"
    )


_CLASSES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),), "array": (list,), "object": (dict,),
}  # fmt: skip


def _find_fault(value: Any, schema: dict[str, Any], where: str) -> str:
    """What is wrong with a value; "" if nothing is."""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        faults = [_find_fault(value, option, where) for option in schema["anyOf"]]
        return "" if "" in faults else faults[0]
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} is {value!r}, expected one of {schema['enum']}"
    kind = schema.get("type")
    if kind is None:
        return ""
    # JSON's true is no number, although Python's is.
    is_fit = isinstance(value, _CLASSES[kind]) and isinstance(value, bool) == (kind == "boolean")
    if not is_fit:
        return f"{where} is {value!r}, expected {kind}"
    if kind == "array":
        faults = [
            _find_fault(item, schema["items"], f"{where}[{index}]")
            for index, item in enumerate(value)
        ]
        return next(filter(None, faults), "")
    if kind == "object":
        members = schema.get("properties", {})
        missing = [name for name in schema.get("required", ()) if name not in value]
        if missing:
            return f"{where} needs {', '.join(missing)}"
        others = schema.get("additionalProperties", {})
        faults = [
            _find_fault(item, members.get(name, others), f"{where}.{name}")
            for name, item in value.items()
        ]
        return next(filter(None, faults), "")
    return ""
