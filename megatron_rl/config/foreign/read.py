"""Reads the settings of verl, TRL, prime-rl or slime, and finds out which of them a file is for.

Used by `importing.py`. Nothing of a file is executed: shell words, Python's syntax tree, YAML's
plain types and TOML are read as data. A value that only a program could tell is an `Unread`.
"""

import functools
import re
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
_TRL_FLAGS = {
    "num_generations", "max_completion_length", "per_device_train_batch_size", "loss_type", "beta",
    "model_name_or_path", "output_dir", "generation_batch_size",
}  # fmt: skip
_STARTS_VERL = re.compile(r"(verl|recipe)[./]")


def read_foreign(paths: Sequence[Path], words: Sequence[str] = ()) -> Foreign:
    """The settings of files. Raises InputError.

    paths: TOML files of prime-rl; a script or YAML of TRL, or the shell script that starts it; a
    script of slime; or a script and YAML files of verl.
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
    if starts := [path for path in scripts if path.suffix not in (".py", ".toml")]:
        if flags := _started(starts[0]):
            return _with_flags(flags, [path for path in paths if path not in starts], words)
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
            "several files are read where all are TOML of prime-rl, or a shell script and what it "
            "starts (its YAML files, or a script of TRL): name one"
        )
    return trl_script(paths[0], text_of(paths[0])) if is_python else _trl_yaml(paths[0])


def _with_flags(flags: Foreign, paths: Sequence[Path], words: Sequence[str]) -> Foreign:
    """The settings of a shell script, above those of a script or YAML of TRL that it starts."""
    if flags.system == SLIME:
        if paths or words:
            raise InputError(f"{[*map(str, paths), *words][0]}: a script of slime is read alone")
        return flags
    base = _read(paths, words) if paths or words else Foreign(TRL)
    if base.system != TRL:
        raise InputError(f"{paths[0]} is of {base.system}, and the shell script starts TRL")
    # These name the files that have been read.
    read = {"config", "args"} if paths else set()
    given = base.values | flags.values
    return Foreign(TRL, {key: value for key, value in given.items() if key not in read})


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


def _started(path: Path) -> Foreign | None:
    """The flags of the last command that starts a trainer of slime or TRL; None: there is none."""
    found = None
    for line in commands(path, text_of(path)):
        # Flags in front are those of a launcher, as accelerate.
        place = next((n for n, word in enumerate(line) if word.endswith((".py", "grpo"))), None)
        if place is None or any(map(_STARTS_VERL.match, line)):
            continue
        front, name, back = line[:place], PurePath(line[place]).name, _flags(line[place + 1 :])
        if name in _SLIME and "rollout-batch-size" in back:
            found = Foreign(SLIME, {name: True} | back)
        elif known := {key.replace("-", "_"): value for key, value in back.items()}:
            if _TRL_FLAGS & known.keys() or name == "grpo":
                found = Foreign(TRL, _processes(front) | known)
    return found


def _processes(words: Sequence[str]) -> dict[str, Any]:
    """The number of processes among the words in front of a script."""
    text = " ".join(words)
    given = re.search(r"--num[_-]processes[ =](\d+)", text)
    return {"num_processes": int(given[1])} if given else {}


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
            for n, one in enumerate(value):
                inner = one.items() if isinstance(one, dict) else [("path", one)]
                found.values |= {f"{key}.{n}.{argument}": given for argument, given in inner}
        else:
            found.values[key] = value
    return found
