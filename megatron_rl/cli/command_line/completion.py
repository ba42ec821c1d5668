"""What a shell offers for a word that is being typed: keys, values, configurations, folders.

Called by typer while a shell waits: nothing heavier than the configuration tree is imported.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_QUOTED = re.compile(r'"([^"]*)"')
_MOST = 2000
"""Folders that are looked at for one word."""


def complete_override(incomplete: str) -> list[str]:
    """`section.key=` step by step, then the values of a key that has a fixed set of them."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in values_of(key)]
    return sorted({_next_part(name, incomplete) for name in _keys_like(incomplete)})


def complete_key(incomplete: str) -> list[str]:
    """Keys and sections, step by step."""
    found = {_next_part(name, incomplete) for name in _keys_like(incomplete)}
    return sorted(text.rstrip("=") for text in found)


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
    """Keys that begin so, with `=`; numbers and names of the user's as they were typed."""
    typed = incomplete.split(".")
    for key in _kinds():
        parts = key.split(".")
        if len(parts) < len(typed):
            continue
        known = [t if _stands_for(p, t) else p for p, t in zip(parts, typed, strict=False)]
        name = ".".join([*known, *parts[len(typed) :]])
        if name.startswith(incomplete):
            yield f"{name}="


def _next_part(name: str, incomplete: str) -> str:
    """The key up to the end of the part that is being typed, and to the next choice after it."""
    end = name.find(".", len(incomplete))
    shown = name if end < 0 else name[: end + 1]
    # What only the user can name is left to them.
    return shown.removesuffix("NAME.")


def _stands_for(part: str, typed: str) -> bool:
    return bool(typed) and (part == "NAME" or (part == "0" and typed.isdigit()))


def _match(pattern: str, key: str) -> bool:
    parts, typed = pattern.split("."), key.split(".")
    return len(parts) == len(typed) and all(
        part == text or _stands_for(part, text) for part, text in zip(parts, typed, strict=True)
    )


def complete_config(incomplete: str) -> list[str]:
    """Names of shipped configurations, TOML files, folders that may have some."""
    from megatron_rl.config.shipped import shipped

    names = [name for name in shipped() if name.startswith(incomplete)]
    return names + _paths(incomplete, lambda path: path.suffix == ".toml")


def complete_run_folder(incomplete: str) -> list[str]:
    """Folders of runs, those in runs/ among them, and folders on the way to others."""
    found = [str(path) for path in _runs_in(Path("runs")) if str(path).startswith(incomplete)]
    return found + [text for text in _paths(incomplete, _is_run) if text not in found]


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _runs_in(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if _is_run(path)]


def _paths(incomplete: str, is_wanted: Callable[[Path], bool]) -> list[str]:
    """What is wanted below the folder that was typed so far; folders with a slash."""
    head, slash, tail = incomplete.rpartition("/")
    found = []
    for path in _listed(Path(head + slash or ".")):
        if path.name.startswith(tail) and not (path.name.startswith(".") and not tail):
            text = head + slash + path.name
            if is_wanted(path):
                found.append(text)
            elif path.is_dir():
                found.append(f"{text}/")
    return found


def _listed(folder: Path) -> Iterable[Path]:
    try:
        return sorted(path for _, path in zip(range(_MOST), folder.iterdir(), strict=False))
    except OSError:
        # No such folder, or not ours to read: there is nothing to offer.
        return []
