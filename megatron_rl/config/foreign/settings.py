"""Settings of another system as data, and the limits of reading them. Used by the readers here."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError

VERL, TRL, PRIME, SLIME = "verl", "TRL", "prime-rl", "slime"
# Limits for files that grow without end: a variable that holds another one twice, and so on.
MAX_CHARACTERS, MAX_VALUE, MAX_WORDS, MAX_NUMBER = 200_000, 4096, 10_000, 1e15
WHY = "the file is read, not run, and does not tell this value"
_EXPONENT = re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+")
_OPEN = re.compile(r"\$[({\w][^/'\" ,\]]*|`[^`]*`")


@dataclass(frozen=True)
class Unread:
    """A value that the file does not tell."""

    text: str
    why: str


@dataclass
class Foreign:
    """Settings of another system."""

    system: str
    values: dict[str, Any] = field(default_factory=dict)
    """By their key there. Keys of several prime-rl files: FILE: KEY."""


def word_value(text: str) -> Any:
    """The value of a word of a command line, as Hydra reads it."""
    plain = text.strip()
    if unset := _OPEN.search(plain):
        return Unread(plain, f"{unset[0]} has no value in this file")
    if plain.startswith("[") and plain.endswith("]"):
        return [word_value(item) for item in plain[1:-1].split(",") if item.strip()]
    if plain[:1] in "'\"" and plain[:1] == plain[-1:]:
        return plain[1:-1]
    if plain.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(plain.lower())
    return number(plain)


def number(text: str) -> Any:
    """The number that a text is, else the text."""
    for kind in (int, float):
        try:
            return kind(text) if any(map(str.isdigit, text)) else text
        except ValueError:
            continue
    return text


def text_of(path: Path) -> str:
    """The text of a file. Raises InputError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{path} has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    return text


def yaml_of(path: Path) -> dict[str, Any]:
    """The tree of a YAML file. Raises InputError."""
    import yaml

    text = text_of(path)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InputError(f"{path} has aliases (*name), which are not read: write the values")
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} holds no settings: expected a YAML of verl, or of `trl grpo`")
    plain: dict[str, Any] = _plain(tree)
    return plain


def _plain(value: Any) -> Any:
    """The value with texts as keys, and with the numbers that YAML takes for texts, as 1e-6."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
