"""`megatron-rl config`: what can be set, what a run would use, and how two of them differ."""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.config.commented import commented_toml, explain, markdown, value_text
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import read_layers, resolve
from megatron_rl.config.layers import DEFAULT, Layers, leaves
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.reference import Entry, find_entries, tables
from megatron_rl.config.shipped import config_path, shipped
from megatron_rl.config.tree import Config

_MISSING = "not given"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `megatron-rl config`."""
    parser.add_argument("--markdown", action="store_true", help="print docs/configuration.md")
    parser.set_defaults(handler=_print, overrides=[])
    parts = parser.add_subparsers(dest="part")
    one = parts.add_parser("explain", help="what a key or the keys of a section mean")
    one.add_argument("key", metavar="section.key")
    one.set_defaults(handler=_explain)
    show = parts.add_parser("show", help="every value that a run would use, and where it is from")
    add_config_argument(show, is_required=False)
    show.add_argument("--changed", action="store_true", help="only what is not the default")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument("overrides", nargs="*", metavar="FILE | section.key=value")
    show.set_defaults(handler=_show)
    two = parts.add_parser("diff", help="how two configurations differ; exit code 1 if they do")
    two.add_argument("first", help="TOML file, run folder, or name of a shipped configuration")
    two.add_argument("second")
    two.add_argument("--json", action="store_true", help="print JSON")
    two.set_defaults(handler=_diff)
    parts.add_parser("list", help="the shipped configurations").set_defaults(handler=_list)


def add_config_argument(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """`--config`, which may be given several times."""
    parser.add_argument(
        "--config",
        action="append",
        required=is_required,
        metavar="FILE",
        help="TOML file, or the name of a shipped one; of several, later ones win",
    )


def config_files(options: argparse.Namespace) -> list[Path]:
    """The files that `--config` named. Raises ConfigError."""
    return [config_path(text) for text in options.config or []]


def _print(options: argparse.Namespace, console: Console) -> int:
    # Not through rich, which would wrap lines and colour what is to be a file.
    print(markdown() if options.markdown else commented_toml(), end="", file=console.file)
    return 0


def _explain(options: argparse.Namespace, console: Console) -> int:
    found = find_entries(options.key)
    if not found:
        known = [entry.key for table in tables() for entry in table.entries]
        known += [table.key for table in tables()]
        nearest = difflib.get_close_matches(options.key, known, n=3, cutoff=0.4)
        hint = f"; near it: {', '.join(nearest)}" if nearest else ""
        raise InputError(f"{options.key!r} is neither a key nor a section{hint}")
    for entry in found:
        console.print(Text(entry.key, style="bold"), soft_wrap=True)
        for line in _explanation(entry):
            console.print(Text(f"  {line}"), soft_wrap=True)
    return 0


def _explanation(entry: Entry) -> list[str]:
    lines = [explain(entry)]
    if not entry.is_required:
        default = _MISSING if entry.default is None else value_text(entry.default)
        lines.append(f"default: {default}")
    for name, preset in PRESETS.items():
        filled = {f"algorithm.{key}": value for key, value in leaves(preset.values, "")}
        if entry.key in filled:
            lines.append(f"preset {name}: {value_text(filled[entry.key])}")
    return lines


def _show(options: argparse.Namespace, console: Console) -> int:
    named = [_file(word) for word in options.overrides if "=" not in word]
    overrides = [word for word in options.overrides if "=" in word]
    layers = read_layers([*named, *config_files(options)], overrides)
    rows = resolved_rows(layers)
    if options.changed:
        rows = [row for row in rows if row[2] != DEFAULT]
    if options.json:
        print(
            json.dumps({key: {"value": v, "from": origin} for key, v, origin in rows}),
            file=console.file,
        )
        return 0
    table = _table("value", "from")
    for key, value, origin in rows:
        table.add_row(Text(key), Text(_shown(value)), Text(_near(origin), style="dim"))
    console.print(table)
    return 0


def resolved_rows(layers: Layers) -> list[tuple[str, Any, str]]:
    """Key, value and origin of everything that is set. Raises ConfigError."""
    return [(key, value, layers.origin_of(key)) for key, value in _values(resolve(layers)).items()]


def _values(config: Config) -> dict[str, Any]:
    return dict(leaves(config.model_dump(mode="json"), ""))


def _diff(options: argparse.Namespace, console: Console) -> int:
    first, second = (
        _values(resolve(read_layers(_file(n)))) for n in (options.first, options.second)
    )
    differing = [
        key
        for key in [*first, *(key for key in second if key not in first)]
        if first.get(key) != second.get(key)
    ]
    if options.json:
        found = {key: [first.get(key), second.get(key)] for key in differing}
        print(json.dumps(found), file=console.file)
        return 1 if differing else 0
    table = _table(options.first, options.second)
    for key in differing:
        table.add_row(Text(key), Text(_shown(first.get(key))), Text(_shown(second.get(key))))
    if differing:
        console.print(table)
    else:
        console.print("no difference")
    return 1 if differing else 0


def _table(*columns: str) -> Table:
    table = Table("key", *columns, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    return table


def _file(text: str) -> Path:
    saved = Path(text) / "config.toml"
    return saved if saved.is_file() else config_path(text)


def _shown(value: Any) -> str:
    text = _MISSING if value is None else value_text(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _near(origin: str) -> str:
    """A file below the current folder by its relative path."""
    here = Path.cwd()
    path = Path(origin)
    return str(path.relative_to(here)) if path.is_relative_to(here) else origin


def _list(options: argparse.Namespace, console: Console) -> int:
    table = Table("name", "what it is", box=None, pad_edge=False)
    for name, path in shipped().items():
        table.add_row(name, _headline(path.read_text().splitlines()))
    console.print(table)
    return 0


def _headline(lines: Sequence[str]) -> str:
    """The first sentence of a file's comment."""
    words = " ".join(line.lstrip("# ") for line in lines[:3] if line.startswith("#"))
    return words.split(". ")[0].rstrip(".")
