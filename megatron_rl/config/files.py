"""Reading and writing the configuration tree: TOML, `section.key=value` overrides, errors.

Imported by every process.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from megatron_rl.config.staging import check_stages
from megatron_rl.config.tree import Config

_PRESET = "algorithm.preset="


class ConfigError(ValueError):
    """The configuration is wrong; the text says what was given and what to do."""


def load_config(path: Path | None, overrides: list[str] | None = None) -> Config:
    """Config of a TOML file (or the defaults) with `section.key=value` overrides applied.

    Values are read as TOML, else as plain text. Relative paths stay relative to the current
    folder. Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no valid TOML: {error}") from error
    presets = [text for text in overrides or [] if text.startswith(_PRESET)]
    for override in presets:
        _forget_other_preset(tree, override)
    for override in [*presets, *(overrides or [])]:
        _apply_override(tree, override)
    try:
        config = Config.model_validate(tree)
        check_stages(config)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error)) from error
    except ValueError as error:
        raise ConfigError(f"the configuration is wrong:\n  {error}") from error
    return config


def _forget_other_preset(tree: dict[str, Any], override: str) -> None:
    """A file that states the whole of one preset would leave nothing of the one that is asked."""
    section = tree.get("algorithm")
    asked = _parse_value(override.removeprefix(_PRESET))
    if isinstance(section, dict) and section.get("preset") != asked:
        tree["algorithm"] = {}


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or "." not in key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, name = key.strip().split(".")
    node: Any = tree
    for section in sections:
        if isinstance(node, list):
            node = _list_item(node, section, override)
        else:
            node = node.setdefault(section, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {section} is no section")
    if isinstance(node, list):
        raise ConfigError(f"override {override!r}: name an item, as in prompts.0.{name}=...")
    node[name] = _parse_value(text.strip())


def _list_item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"override {override!r}: there is no item {index} (0..{len(items) - 1})")
    return items[int(index)]


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: pydantic.ValidationError) -> str:
    lines = []
    for item in error.errors():
        location = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {location!r}{_nearest(location)}")
        else:
            given = "" if item["type"] == "value_error" else f" (given: {item['input']!r:.80})"
            lines.append(f"{location + ': ' if location else ''}{item['msg']}{given}")
    return "the configuration is wrong:\n  " + "\n  ".join(lines)


def _nearest(location: str) -> str:
    known = list(_known_keys(Config, ""))
    plain = ".".join(part for part in location.split(".") if not part.isdigit())
    matches = difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _known_keys(model: type[pydantic.BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                keys.extend(_known_keys(kind, f"{prefix}{name}."))
    return keys


def dump_toml(config: Config) -> str:
    """The whole tree as TOML; `load_config` reads it back to an equal Config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def override(key: str, text: str) -> str:
    """The override that gives `key` this text, whatever it looks like."""
    return f"{key}={tomli_w.dumps({'text': text}).removeprefix('text = ').rstrip()}"
