"""Completions of a word: keys, values, shipped configurations, run folders.

Called by typer while a shell waits: nothing heavier than the configuration tree is imported. Where
nothing is offered, bash completes file names.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

_QUOTED = re.compile(r'"([^"]*)"')


def complete_override(incomplete: str) -> list[str]:
    """Keys with `=`, then the values of a key that has a fixed set of them."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in values_of(key)]
    return [f"{name}=" for name in complete_key(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys that begin with this text."""
    return sorted(_keys_like(incomplete))


def values_of(key: str) -> list[str]:
    """Values of a key, where they are a fixed set; names of functions and presets among them."""
    from megatron_rl.config.presets import PRESETS

    if key == "algorithm.preset":
        return list(PRESETS)
    for pattern, kind in _kinds().items():
        if _match(pattern, key):
            found = _QUOTED.findall(kind)
            return found or (["true", "false"] if kind == "true or false" else [])
    return []


@functools.cache
def _kinds() -> dict[str, str]:
    """What each key takes."""
    from megatron_rl.config.reference import tables

    return {entry.key: entry.kind for table in tables() for entry in table.entries}


def _keys_like(incomplete: str) -> Iterator[str]:
    """Keys that begin with this text; list indices and the user's own names as typed."""
    typed = incomplete.split(".")
    for key in _kinds():
        parts = key.split(".")
        if len(parts) < len(typed):
            continue
        known = [t if _stands_for(p, t) else p for p, t in zip(parts, typed, strict=False)]
        name = ".".join([*known, *parts[len(typed) :]])
        if name.startswith(incomplete):
            yield name


def _stands_for(part: str, typed: str) -> bool:
    return bool(typed) and (part == "NAME" or (part == "0" and typed.isdigit()))


def _match(pattern: str, key: str) -> bool:
    parts, typed = pattern.split("."), key.split(".")
    return len(parts) == len(typed) and all(
        part == text or _stands_for(part, text) for part, text in zip(parts, typed, strict=True)
    )


def complete_config(incomplete: str) -> list[str]:
    """Names of shipped configurations."""
    from megatron_rl.config.shipped import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def complete_run_folder(incomplete: str) -> list[str]:
    """Folders of runs in runs/."""
    found = sorted(str(path.parent) for path in Path("runs").glob("*/config.toml"))
    return [name for name in found if name.startswith(incomplete)]
