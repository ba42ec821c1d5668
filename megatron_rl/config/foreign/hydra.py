"""Reads the settings of verl: a command line, YAML files of Hydra, or both. Used by `read.py`.

Later values win: the files that `defaults:` names, the YAML, the command line of a script, words
behind them. Interpolations are filled in at the end, as Hydra does.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.interpolation import Interpolated
from megatron_rl.config.foreign.settings import VERL, Foreign, Unread, text_of, word_value, yaml_of
from megatron_rl.config.foreign.shell import commands
from megatron_rl.config.foreign.verl import DEFAULTS, OWN_FILES
from megatron_rl.config.layers import leaves
from megatron_rl.config.section import merged

_TABLES = ("actor_rollout_ref", "algorithm", "critic", "data", "reward_model", "trainer")
_MAX_FILES = 64


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
    values = Interpolated(tree, {} if composed.missing else DEFAULTS, is_whole=is_whole)
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
