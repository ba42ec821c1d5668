"""Fills in the interpolations of Hydra's values, ${a.b}, as far as a file tells them.

Used by `hydra.py`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.settings import MAX_VALUE, MAX_WORDS, Unread, word_value

_INNERMOST = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")
_ABSENT = object()
_MAX_DEPTH = 16
"""Of interpolations that name each other."""


class Interpolated:
    """A tree whose texts may name other values of it.

    defaults: by key, for values that the tree lacks. is_whole: whether no other file has values;
    else the default of an interpolation is not known to count.
    """

    def __init__(
        self, tree: Mapping[str, Any], defaults: Mapping[str, Any], *, is_whole: bool
    ) -> None:
        self._tree, self._defaults, self._is_whole = tree, defaults, is_whole
        self._depth = self._count = 0

    def filled(self) -> Any:
        """The tree with values; what cannot be told is an Unread. Raises InputError."""
        return self._value(self._tree, ())

    def _value(self, value: Any, place: Sequence[str]) -> Any:
        self._count += 1
        if self._count > MAX_WORDS:
            raise InputError(f"interpolations make more than {MAX_WORDS} values")
        if isinstance(value, Mapping):
            return {key: self._value(inner, (*place, key)) for key, inner in value.items()}
        if isinstance(value, list):
            items = [self._value(inner, (*place, str(n))) for n, inner in enumerate(value)]
            return next((item for item in items if isinstance(item, Unread)), items)
        if isinstance(value, Unread) and "${" in value.text:
            # A word of the command line, whose value may be a number or a list.
            text = self._text(value.text, place)
            return word_value(text) if isinstance(text, str) else text
        if value == "???":
            return Unread("???", "it has to be given there too")
        return self._text(value, place) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, place: Sequence[str]) -> Any:
        given = text
        while "${" in text:
            found = _INNERMOST.search(text)
            if found is None or len(text) > MAX_VALUE:
                return Unread(given, "this is not read")
            value = self._reference(found[1].strip(), place)
            if found[0] == text or isinstance(value, Unread):
                return value
            if isinstance(value, dict | list):
                return Unread(given, f"{found[0]} is no single value")
            text = f"{text[: found.start()]}{value}{text[found.end() :]}"
        return text

    def _reference(self, inner: str, place: Sequence[str]) -> Any:
        """The value of ${inner}."""
        name, separator, argument = inner.partition(":")
        unread = Unread(f"${{{inner}}}", f"{name} is a function: write its value")
        if not separator:
            value = self._at(inner, place)
            absent = Unread(f"${{{inner}}}", f"{inner} has no value in this file")
            return absent if value is _ABSENT else value
        key, _, default = (part.strip() for part in argument.partition(","))
        if name == "oc.select":
            value = self._at(key, place)
            if value is not _ABSENT:
                return value
            absent = Unread(f"${{{inner}}}", f"{key} may have a value in a file that is not here")
            if not self._is_whole:
                return absent
            return {} if default == "{}" else word_value(default or "null")
        if name == "oc.env":
            home = str(Path.home())
            return home if key == "HOME" else Unread(unread.text, f"the environment tells {key}")
        return unread

    def _at(self, key: str, place: Sequence[str]) -> Any:
        """The value of a key, which is relative with leading dots."""
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                return Unread(f"${{{key}}}", "interpolations that name each other")
            dots = len(key) - len(key.lstrip("."))
            start = list(place)[: max(0, len(place) - dots)] if dots else []
            path = [*start, *(part for part in re.split(r"[.\[\]]+", key) if part)]
            node: Any = self._tree
            for depth, part in enumerate(path):
                if isinstance(node, list) and part.isdigit() and int(part) < len(node):
                    node = node[int(part)]
                elif isinstance(node, Mapping) and part in node:
                    node = node[part]
                else:
                    return self._defaults.get(".".join(path), _ABSENT)
                if isinstance(node, str) and depth + 1 < len(path):
                    node = self._value(node, path[: depth + 1])
            return self._value(node, path)
        finally:
            self._depth -= 1
