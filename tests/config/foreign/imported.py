"""Imports files of other systems, and checks what holds for each of their keys."""

from pathlib import Path

from megatron_rl.config.files import load_config
from megatron_rl.config.foreign.read import read_foreign
from megatron_rl.config.importing import Imported, import_settings
from megatron_rl.config.tree import Config


def imported(*paths: Path, words: tuple[str, ...] = ()) -> tuple[Imported, Config]:
    """What is imported, and what the file stands for; each key is in exactly one list."""
    found = accounted(*paths, words=words)
    assert not found.fault
    out = paths[0].with_name("ours.toml")
    out.write_text(found.toml())
    return found, load_config(out)


def accounted(*paths: Path, words: tuple[str, ...] = ()) -> Imported:
    """What is imported, also where it does not load yet."""
    foreign = read_foreign(paths, words)
    found = import_settings(foreign)
    lists = [found.mapped, found.default_here, [*found.no_counterpart], [*found.unknown]]
    assert sorted(key for one in lists for key in one) == sorted(foreign.values)
    text = found.toml()
    for key in foreign.values:
        assert key.rpartition(": ")[2] in text
    return found


def written(folder: Path, name: str, text: str) -> Path:
    """The path of a new file."""
    (folder / name).write_text(text)
    return folder / name
