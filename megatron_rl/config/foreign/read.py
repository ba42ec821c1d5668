"""Reads the settings of verl, TRL, prime-rl or slime, and finds out which of them a file is for.

Used by `importing.py`. Nothing of a file is executed: shell words, Python's syntax tree, YAML's
plain types and TOML are read as data. A value that only a program could tell is an `Unread`.
"""

import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign import trl
from megatron_rl.config.foreign.hydra import is_of_verl, read_verl
from megatron_rl.config.foreign.rules import rule_of
from megatron_rl.config.foreign.script import trl_script
from megatron_rl.config.foreign.settings import (
    PRIME,
    SLIME,
    TRL,
    Foreign,
    Unread,
    text_of,
    word_value,
    yaml_of,
)
from megatron_rl.config.foreign.shell import commands
from megatron_rl.config.layers import leaves
from megatron_rl.config.section import merged

_SLIME = ("train.py", "train_async.py")


def read_foreign(paths: Sequence[Path], words: Sequence[str] = ()) -> Foreign:
    """The settings of files. Raises InputError.

    paths: TOML files of prime-rl, a script or YAML of TRL, a script of slime, or a script and YAML
    files of verl.
    words: key=value of verl, which come last.
    """
    try:
        return _read(paths, words)
    except RecursionError as error:
        raise InputError(f"{paths[0]}: its values are nested too deeply") from error


def _read(paths: Sequence[Path], words: Sequence[str]) -> Foreign:
    yamls = [path for path in paths if path.suffix in (".yaml", ".yml")]
    scripts = [path for path in paths if path not in yamls]
    is_python = any(path.suffix == ".py" for path in scripts)
    if len(paths) == 1 and scripts and not is_python and not words:
        if flags := _slime(paths[0]):
            return flags
    is_verl = not is_python and len(scripts) < 2 and all(is_of_verl(yaml_of(p)) for p in yamls)
    is_toml = not yamls and all(path.suffix == ".toml" for path in paths)
    if is_verl and not is_toml:
        return read_verl(scripts, yamls, words)
    if words:
        raise InputError(f"{words[0]!r}: key=value is read behind a script or YAML of verl only")
    if is_toml:
        return _prime(paths)
    if len(paths) > 1:
        raise InputError(
            "several files are read where all are TOML of prime-rl, or all are of verl (one script "
            "and its YAML files): name one"
        )
    return trl_script(paths[0], text_of(paths[0])) if is_python else _trl_yaml(paths[0])


def _prime(paths: Sequence[Path]) -> Foreign:
    """Files of the whole run, of which later ones win; or one file for each process."""
    trees: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            tree = tomllib.loads(text_of(path))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is no valid TOML: {error}") from error
        trees[f"{path.stem}: " if len(paths) > 1 else ""] = tree
    if any({"trainer", "orchestrator", "inference"} & tree.keys() for tree in trees.values()):
        trees = {"": functools.reduce(merged, trees.values())}
    found = Foreign(PRIME)
    for prefix, tree in trees.items():
        for key, value in leaves(tree, ""):
            if key:
                found.values[prefix + key] = None if value == "None" else value
    return found


def _slime(path: Path) -> Foreign | None:
    """The flags of the last command that starts slime's trainer; None: there is none."""
    found = None
    if path.suffix == ".toml":
        return None
    for line in commands(path, text_of(path)):
        places = [n for n, word in enumerate(line) if PurePath(word).name in _SLIME]
        if places and any(word.startswith("--rollout-") for word in line):
            found = Foreign(SLIME, {PurePath(line[places[0]]).name: True})
            found.values |= _flags(line[places[0] + 1 :])
    return found


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Values of flags: of none True, of several a list. Lists of other files are Unread."""
    values: dict[str, list[Any]] = {}
    unread: dict[str, Any] = {}
    name = ""
    for word in words:
        if word in ("|", "&", ";", "&&", "||"):
            break
        if word.startswith("${") and word.endswith("[@]}"):
            unread[word] = Unread(word, "a list of another file")
        elif word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            values[name] = [word_value(value)] if separator else []
        elif name:
            values[name].append(word_value(word))
    single = {name: given[0] if len(given) == 1 else given for name, given in values.items()}
    return unread | {name: True if given == [] else given for name, given in single.items()}


def _trl_yaml(path: Path) -> Foreign:
    tree = yaml_of(path)
    if not any(rule_of(trl.RULES, key) for key in tree):
        raise InputError(
            f"{path} is neither a YAML of `trl grpo`, whose keys are those of GRPOConfig, nor of "
            "verl, which has tables such as actor_rollout_ref, data, trainer"
        )
    mixture = tree.pop("dataset_mixture", None)
    if isinstance(mixture, dict):
        tree |= {f"dataset_mixture.{key}": value for key, value in mixture.items()}
    found = Foreign(TRL)
    for key, value in tree.items():
        if key.endswith("datasets") and isinstance(value, list):
            sets = {f"{key}.{n}": one for n, one in enumerate(value)}
            for name, one in sets.items():
                inner = one.items() if isinstance(one, dict) else [("path", one)]
                found.values |= {f"{name}.{argument}": given for argument, given in inner}
        else:
            found.values[key] = value
    return found
