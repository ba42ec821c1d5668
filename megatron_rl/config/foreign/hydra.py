"""Reads the settings of verl: a command line, YAML files of Hydra, or both. Used by `read.py`.

Later values win: the files that `defaults:` names, the YAML, the command line of a script, words
behind them. Interpolations, ${a.b}, are filled in at the end, as Hydra does, as far as the files
tell their values.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.settings import (
    MAX_VALUE,
    MAX_WORDS,
    VERL,
    Foreign,
    Unread,
    text_of,
    word_value,
    yaml_of,
)
from megatron_rl.config.foreign.shell import commands
from megatron_rl.config.foreign.verl import DEFAULTS, OWN_FILES
from megatron_rl.config.layers import leaves
from megatron_rl.config.section import merged

_TABLES = ("actor_rollout_ref", "algorithm", "critic", "data", "reward_model", "trainer")
_MAX_FILES = 64
_INNERMOST = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")
_ABSENT = object()
_MAX_DEPTH = 16
"""Of interpolations that name each other."""


def is_of_verl(tree: Mapping[str, Any]) -> bool:
    """Whether a YAML has the tables of verl, or only names other files of Hydra."""
    return "defaults" in tree or any(isinstance(tree.get(name), dict) for name in _TABLES)


def read_verl(scripts: Sequence[Path], yamls: Sequence[Path], words: Sequence[str]) -> Foreign:
    """The settings of at most one script, of YAML files, and of words key=value.

    Raises InputError.
    """
    found = Foreign(VERL)
    composed = _Composed()
    for path in yamls:
        composed.add(path)
    tree = composed.tree
    for word in [*_arguments(scripts), *words]:
        key, separator, value = word.partition("=")
        if key.startswith("-"):
            # These name the YAML, which has been read where it was given.
            if not (yamls and key in ("--config-name", "--config-path", "-cn", "-cp")):
                found.values[key] = value
        elif key.startswith("~"):
            found.values[key] = Unread(value, "removed there")
        elif separator:
            _put(tree, key.lstrip("+").split("."), word_value(value))
    for name in composed.missing:
        found.values[f"defaults.{name}"] = Unread(name, f"there is no {name}.yaml beside this file")
    is_whole = bool(yamls) and not composed.unread
    values = _Interpolated(tree, {} if composed.missing else DEFAULTS, is_whole=is_whole)
    for key, value in leaves(values.filled(), ""):
        # These are names of verl's own classes.
        if key and key.rpartition(".")[2] != "_target_":
            found.values[key] = value
    return found


def _arguments(scripts: Sequence[Path]) -> Iterator[str]:
    """The arguments of the last command that starts verl's trainer; options as --name=value."""
    for path in scripts:
        words: list[str] = []
        for line in commands(path, text_of(path)):
            places = [n for n, word in enumerate(line) if _starts_verl(word)]
            if places:
                words = line[places[0] + 1 :]
        if not words:
            raise InputError(
                f"{path} holds no command of verl (python3 -m verl.trainer.main_ppo key=value "
                "...); a script of TRL ends in .py or .yaml, a file of prime-rl in .toml"
            )
        rest = iter(words)
        for word in rest:
            if word in ("|", "&", ";", "&&", "||"):
                break
            is_option = word.startswith("-") and "=" not in word
            yield f"{word}={next(rest, '')}" if is_option else word


def _starts_verl(word: str) -> bool:
    """Whether a word is verl.trainer.main_ppo, or another main module or file of verl."""
    module = word.removesuffix(".py").replace("/", ".").lstrip(".")
    last = module.rpartition(".")[2]
    is_main = last.startswith("main_") or last.endswith("_main")
    return module.startswith(("verl.", "recipe.")) and is_main


def _put(tree: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    tree[parts[-1]] = value


class _Composed:
    """A YAML with the files that its `defaults:` names, where they lie beside it."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.missing: list[str] = []
        """Files that are neither there nor verl's own."""
        self.unread = False
        """Whether a file is not there."""
        self._count = 0

    def add(self, path: Path) -> None:
        """Merge a file into the tree. Raises InputError."""
        self.tree = merged(self.tree, self._read(path, path.parent))

    def _read(self, path: Path, root: Path) -> dict[str, Any]:
        self._count += 1
        if self._count > _MAX_FILES:
            raise InputError(f"{path}: defaults name more than {_MAX_FILES} files")
        own = yaml_of(path)
        entries = own.pop("defaults", None) or []
        own.pop("hydra", None)
        found: dict[str, Any] = {}
        for name, package in _entries(path, [*entries, "_self_"]):
            if name == "_self_":
                # Without a place in the list, a file's own values come last.
                found, own = merged(found, own), {}
                continue
            folder = root if name.startswith("/") else path.parent
            file = folder / f"{name.strip('/').removesuffix('.yaml')}.yaml"
            if file.is_file():
                inner = self._read(file, root)
                for part in reversed([part for part in package.split(".") if part]):
                    inner = {part: inner}
                found = merged(found, inner)
            else:
                self.unread = True
                if not any(fnmatch.fnmatchcase(name.strip("/"), one) for one in OWN_FILES):
                    self.missing.append(name)
        return found


def _entries(path: Path, entries: list[Any]) -> Iterator[tuple[str, str]]:
    """(file, package) of each entry of a list of defaults."""
    for entry in entries:
        group, options = (
            next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", entry)
        )
        group, _, package = str(group).removeprefix("optional ").partition("@")
        for option in options if isinstance(options, list) else [options]:
            if option is None or str(group).startswith("override "):
                continue
            if not isinstance(option, str):
                raise InputError(f"{path}: {entry!r} is no entry of Hydra's list of defaults")
            name, _, own_package = option.partition("@")
            name = f"{group}/{name}" if group else name
            given = package or own_package or name.rpartition("/")[0].strip("/").replace("/", ".")
            yield name, given.removeprefix("_global_").strip(".")


class _Interpolated:
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
