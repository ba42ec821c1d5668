"""Merges TOML files and overrides into one tree, and records each value's origin.

Used by `files.py` and `megatron-rl config`. Later layers win key by key; a list, such as
`[[prompts]]`, replaces the whole list of earlier layers.
"""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import DEFAULT_PRESET, DERIVED
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.expert import own_key, public_key, without_expert
from megatron_rl.config.paths import with_absolute_paths
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.section import Section, merged

OVERRIDE = "command line"
DEFAULT = "default"
_DERIVED = "derived"
_PRESET = "algorithm.preset="
_TABLES = ("prompts", "stages", "eval.sets", "reward.extra")
"""Lists of tables that an override may extend."""
_SHOWN = 3
"""Keys that a message names."""


class Layers:
    """Given values: files in their order, then overrides."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        """As one TOML would hold it."""
        self._origins: dict[str, str] = {}

    def add_file(self, path: Path) -> None:
        """Merge a TOML file into the tree. Raises ConfigError."""
        try:
            given = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no valid TOML: {error}") from error
        try:
            given = with_absolute_paths(without_expert(given), "", path.parent.resolve())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        algorithm = given.get("algorithm")
        if isinstance(algorithm, dict) and "preset" in algorithm:
            self._forget_other_preset(algorithm["preset"])
        self.tree = merged(self.tree, given)
        self._note(given, "", str(path))

    def add_overrides(self, overrides: Sequence[str]) -> None:
        """Merge `section.key=value` texts into the tree. Raises ConfigError."""
        presets = [text for text in overrides if text.startswith(_PRESET)]
        for text in presets:
            self._forget_other_preset(parse_value(text.removeprefix(_PRESET)))
        for text in [*presets, *overrides]:
            key, value = _apply_override(self.tree, text)
            self._forget(key)
            self._note(value, key, OVERRIDE)

    def _forget_other_preset(self, asked: object) -> None:
        """Remove values of [algorithm] when the preset changes: a saved file states all of them."""
        section = self.tree.get("algorithm")
        if isinstance(section, dict) and section.get("preset", DEFAULT_PRESET) != asked:
            self.tree["algorithm"] = {}
            self._forget("algorithm")

    def _note(self, value: object, key: str, origin: str) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self._note(inner, f"{key}.{name}" if key else name, origin)
            return
        self._forget(key)
        for leaf, _ in leaves(value, key):
            self._origins[leaf] = origin

    def _forget(self, key: str) -> None:
        for leaf in [k for k in self._origins if k == key or k.startswith(f"{key}.")]:
            del self._origins[leaf]

    def origin_of(self, key: str) -> str:
        """The origin of a key's value in the resolved configuration."""
        if key in self._origins:
            return self._origins[key]
        algorithm = self.tree.get("algorithm")
        given = algorithm if isinstance(algorithm, dict) else {}
        preset = given.get("preset", DEFAULT_PRESET)
        filled = {f"algorithm.{leaf}" for leaf, _ in leaves(PRESETS[preset].values, "")}
        if key in filled:
            return f"preset {preset}"
        return _DERIVED if key in DERIVED else DEFAULT


def leaves(value: object, key: str) -> Iterator[tuple[str, Any]]:
    """(key, value) below a value of a tree; keys have numbers for items of lists of tables."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from leaves(item, f"{key}.{number}")
    else:
        yield key, value


def changed_keys(before: Section, now: Section) -> list[str]:
    """Keys whose values differ between two configurations, sorted."""
    return list(changed_values(before, now))


def changed_values(before: Section, now: Section) -> dict[str, tuple[object, object]]:
    """(value before, value now) of each key that differs, sorted; None: a key that is not there."""
    first, second = (dict(leaves(one.model_dump(), "")) for one in (before, now))
    pairs = {key: (first.get(key), second.get(key)) for key in sorted(first.keys() | second)}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def first_of(keys: Sequence[str]) -> str:
    """The first of some keys by their public names, and the number of the others."""
    more = f" and {len(keys) - _SHOWN} more keys" if len(keys) > _SHOWN else ""
    return ", ".join(map(public_key, keys[:_SHOWN])) + more


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, Any]:
    """Set the value; returns (key, value)."""
    key, separator, text = override.partition("=")
    if not separator or "." not in key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    key = own_key(key.strip())
    *sections, name = key.split(".")
    node: Any = tree
    for depth, section in enumerate(sections, start=1):
        if isinstance(node, list):
            node = _list_item(node, section, override)
        else:
            node = node.setdefault(section, [] if ".".join(sections[:depth]) in _TABLES else {})
        if not isinstance(node, dict | list):
            raise ConfigError(
                f"override {override!r}: {section} is no section, since it has the value "
                f"{node!r:.80}: leave that value out"
            )
    if isinstance(node, list):
        raise ConfigError(f"override {override!r}: name an item, as in prompts.0.{name}=...")
    node[name] = with_absolute_paths(parse_value(text.strip()), key, Path.cwd())
    return key, node[name]


def _list_item(items: list[Any], index: str, override: str) -> Any:
    """The item; the number after the last one appends a table."""
    if not index.isdigit() or int(index) > len(items):
        raise ConfigError(
            f"override {override!r}: there is no item {index}; the next new one is {len(items)}"
        )
    if int(index) == len(items):
        items.append({})
    return items[int(index)]


def parse_value(text: str) -> Any:
    """The value of an override: TOML, else plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
