"""Reading and writing the configuration tree: TOML, `section.key=value` overrides, errors.

Imported by every process.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic
import tomli_w
from pydantic.fields import FieldInfo

from megatron_rl.config.algorithm import Part
from megatron_rl.config.aliases import nearest
from megatron_rl.config.derived import fill_in, patience_of
from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.expert import public_key, scaled_waits, with_expert
from megatron_rl.config.layers import DEFAULT, Layers, parse_value
from megatron_rl.config.paths import with_absolute_paths
from megatron_rl.config.renamed import new_name
from megatron_rl.config.section import Section
from megatron_rl.config.stages import StageConfig
from megatron_rl.config.staging import check_stages
from megatron_rl.config.tree import Config

REQUIRED = {
    "model.path": "a model folder, such as model.path=/models/Qwen2.5-1.5B-Instruct",
    "run.dir": "a new folder for what the run leaves, such as run.dir=runs/first",
}
"""Keys that have no useful default -> text that tells what to give."""


def require(layers: Layers, keys: Sequence[str]) -> None:
    """Raise ConfigError for missing keys of REQUIRED."""
    missing = [key for key in keys if layers.origin_of(key) == DEFAULT]
    if missing:
        raise ConfigError(
            "; ".join(f"{key} is not given: give {REQUIRED[key]}" for key in missing)
            + ". A file sets it too ([model] path, [run] dir)"
        )


def load_config(
    path: Path | Sequence[Path] | None, overrides: Sequence[str] | None = None
) -> Config:
    """The configuration of TOML files (or the defaults) and `section.key=value` overrides.

    Later files win, key by key. Override values are TOML, else plain text. `paths.py` tells what
    paths are relative to. Raises ConfigError.
    """
    return resolve(read_layers(path, overrides))


def load_run(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run folder. Raises InputError without a run, ConfigError."""
    saved = run_dir / "config.toml"
    if not saved.is_file():
        raise InputError(f"{run_dir} holds no run: it has no config.toml")
    return load_config(saved, overrides)


def read_layers(
    path: Path | Sequence[Path] | None, overrides: Sequence[str] | None = None
) -> Layers:
    """The unchecked values of files and overrides. Raises ConfigError."""
    layers = Layers()
    for file in [path] if isinstance(path, Path) else path or []:
        layers.add_file(file)
    layers.add_overrides(overrides or [])
    return layers


def resolve(layers: Layers) -> Config:
    """The checked configuration. Raises ConfigError."""
    train = layers.tree.get("train")
    if isinstance(train, dict) and train.get("epochs") and "steps" in train:
        where = [
            f"train.{key} of {layers.origin_of(f'train.{key}')}" for key in ("steps", "epochs")
        ]
        raise ConfigError(f"{' and '.join(where)} exclude each other: leave one of them out")
    try:
        config = Config.model_validate(_with_patience(fill_in(layers.tree)))
        check_stages(config)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error)) from error
    except ValueError as error:
        raise ConfigError(f"the configuration is wrong:\n  {error}") from error
    return config


def _with_patience(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with default deadlines times `run.patience`."""
    patience = patience_of(tree)
    if patience == 1.0:
        return tree
    filled = copy.deepcopy(tree)
    for key, seconds in scaled_waits(patience, Config().model_dump()):
        section, _, name = key.partition(".")
        if isinstance(there := filled.setdefault(section, {}), dict):
            there.setdefault(name, seconds)
    return filled


def _explain(error: pydantic.ValidationError) -> str:
    lines = []
    for item in error.errors():
        location = public_key(".".join(str(part) for part in item["loc"]))
        if item["type"] == "extra_forbidden":
            lines.append(_unknown(location))
        elif item["type"] == "model_type":
            lines.append(_no_section(location, item["ctx"]["class_name"], item["input"]))
        else:
            given = "" if item["type"] == "value_error" else f" (given: {item['input']!r:.80})"
            lines.append(f"{location + ': ' if location else ''}{item['msg']}{given}")
    return "the configuration is wrong:\n  " + "\n  ".join(lines)


def _unknown(location: str) -> str:
    if (renamed := new_name(location)) != location:
        return (
            f"{location!r} is named {renamed!r} now: rename it, or let `megatron-rl config migrate "
            "FILE` rewrite the file"
        )
    if location.startswith("stages."):
        return (
            f"unknown key {location!r}: a stage has the keys "
            + ", ".join(_known_keys(StageConfig, "", leaves_only=True))
            + "; all other keys hold for the whole run"
        )
    matches = nearest(location, _known_keys(Config, ""))
    return f"unknown key {location!r}" + (f"; did you mean {matches[0]!r}?" if matches else "")


def _no_section(location: str, class_name: str, given: object) -> str:
    """A value stands where a section belongs, as in algorithm.normalization="none"."""
    section = _sections(Config)[class_name]
    fix = f"set its keys, such as {location}.{next(iter(section.__annotations__))}"
    if issubclass(section, Part) and "name" in section.model_fields and isinstance(given, str):
        fix = f"set {location}.name to {given!r}"
    return f"{location} is a section and has no value of its own (given: {given!r:.80}): {fix}"


def _sections_of(field: FieldInfo) -> list[type[pydantic.BaseModel]]:
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _sections(model: type[pydantic.BaseModel]) -> dict[str, type[pydantic.BaseModel]]:
    """All sections below a section, by the names of their classes."""
    found: dict[str, type[pydantic.BaseModel]] = {}
    for field in model.model_fields.values():
        for section in _sections_of(field):
            found |= {section.__name__: section} | _sections(section)
    return found


def _known_keys(
    model: type[pydantic.BaseModel], prefix: str, *, leaves_only: bool = False
) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        sections = _sections_of(field)
        if not (sections and leaves_only):
            keys.append(public_key(prefix + name))
        for section in sections:
            keys.extend(_known_keys(section, f"{prefix}{name}.", leaves_only=leaves_only))
    return keys


def dump_toml(config: Config) -> str:
    """The whole tree as TOML, which `load_config` reads back to an equal Config."""
    return tomli_w.dumps(with_expert(config.model_dump(mode="json", exclude_none=True)))


def override(key: str, value: str | list[str]) -> str:
    """The override that sets `key` to a text or texts."""
    return f"{key}={tomli_w.dumps({'value': value}).removeprefix('value = ').rstrip()}"


def from_folder(text: str, folder: Path) -> str:
    """The override with a path relative to `folder` made absolute."""
    key, _, value = text.partition("=")
    given = parse_value(value.strip())
    found = with_absolute_paths(given, key.strip(), folder)
    return text if found == given else override(key.strip(), found)
