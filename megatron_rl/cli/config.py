"""`megatron-rl config`: explains keys; shows, compares, migrates, imports configurations."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl.cli.command_line.command import NoOptions, command, group
from megatron_rl.cli.command_line.parameters import (
    ConfigFiles,
    Json,
    complete_config,
    complete_key,
    complete_override,
)
from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.aliases import meant, nearest
from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.expert import public_key
from megatron_rl.config.files import read_layers, resolve
from megatron_rl.config.foreign.read import read_foreign
from megatron_rl.config.importing import import_settings
from megatron_rl.config.layers import DEFAULT, Layers, leaves
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.reference import (
    Entry,
    commented_toml,
    explain,
    find_entries,
    known_names,
    markdown,
    value_text,
)
from megatron_rl.config.renamed import migrate
from megatron_rl.config.shipped import config_path, names_shipped, shipped
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.kinds import read_as
from megatron_rl.protocol.whole_file import write_whole

_MISSING = "not given"


def _all(
    ctx: typer.Context,
    is_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/configuration.md.")
    ] = False,
) -> int:
    if ctx.invoked_subcommand is None:
        # Not through rich, which would wrap and color the text of a file.
        text = markdown() if is_markdown else commented_toml()
        print(text, end="", file=ctx.obj["console"].file)
    return 0


group(__name__, "Print every key as TOML that explains itself; or one of these:", callback=_all)


@dataclass(frozen=True)
class ExplainOptions:
    keys: Annotated[
        list[str], typer.Argument(metavar="section.key...", autocompletion=complete_key)
    ]


@command("explain", "Say what keys, or the keys of a section, mean; names of verl or TRL work too.")
def explain_keys(options: ExplainOptions, console: Console) -> int:
    """Exit code: 0, 2 (no such key)."""
    for key in options.keys:
        found, lines = find_entries(key), list[Text]()
        if not found:
            known = known_names()
            names = meant(key, known)
            if not names:
                near = nearest(key, known, 3)
                hint = f"; near it: {', '.join(near)}" if near else ""
                raise InputError(f"{key!r} is neither a key nor a section{hint}")
            found = [entry for name in names for entry in find_entries(name)]
            lines.append(Text(f"{key} is here {', '.join(names)}"))
        for entry in found:
            lines.append(Text(entry.key, style="bold"))
            lines += [Text(f"  {line}") for line in _explanation(entry)]
        for text in lines:
            console.print(text, soft_wrap=True)
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


@dataclass(frozen=True)
class ShowOptions:
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | section.key=value", autocompletion=complete_override, show_default=False
        ),
    ] = field(default_factory=list)
    """Files, shipped names, run folders, single keys."""
    config: ConfigFiles = field(default_factory=list)
    changed: bool = False
    """Only values that are not the default."""
    json: Json = False


@command("show", "Print every value that a run would use, and where it is from.")
def show(options: ShowOptions, console: Console) -> int:
    named = [_file(word) for word in options.overrides if "=" not in word]
    overrides = [word for word in options.overrides if "=" in word]
    layers = read_layers([*named, *map(config_path, options.config)], overrides)
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
    show_table(console, table)
    return 0


def resolved_rows(layers: Layers) -> list[tuple[str, Any, str]]:
    """(key, value, origin) of all keys. Raises ConfigError."""
    found = leaves(resolve(layers).model_dump(mode="json"), "")
    return [(public_key(key), value, layers.origin_of(key)) for key, value in found]


_Side = Annotated[
    str,
    typer.Argument(
        help="TOML file, run folder, or name of a shipped configuration",
        autocompletion=complete_config,
    ),
]


@dataclass(frozen=True)
class DiffOptions:
    first: _Side
    second: _Side
    json: Json = False


@command("diff", "Print how two configurations differ; exit code 1 if they do.")
def diff(options: DiffOptions, console: Console) -> int:
    """Exit code: 0 (no difference), 1, 2 (bad input)."""
    first, second = (
        {key: value for key, value, _ in resolved_rows(read_layers(_file(name)))}
        for name in (options.first, options.second)
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
        show_table(console, table)
    else:
        console.print("no difference")
    return 1 if differing else 0


def _table(*columns: str) -> Table:
    table = Table("key", *columns, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    return table


def _file(text: str) -> Path:
    saved = Path(text) / "config.toml"
    return saved if saved.is_file() and not names_shipped(text) else config_path(text)


def _shown(value: Any) -> str:
    text = _MISSING if value is None else value_text(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _near(origin: str) -> str:
    """The origin; a file below the current folder by its relative path."""
    here = Path.cwd()
    path = Path(origin)
    return str(path.relative_to(here)) if path.is_relative_to(here) else origin


@dataclass(frozen=True)
class MigrateOptions:
    files: Annotated[list[Path], typer.Argument(metavar="FILE...")]
    """TOML files to rewrite."""


@command("migrate", "Rewrite TOML files that use former names of keys.")
def migrate_files(options: MigrateOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input; no file is changed)."""
    found = [(path, *_migrated(path)) for path in options.files]
    for path, text, changes in found:
        if changes:
            write_whole(path, text)
        told = changes or ["nothing to change"]
        say(console, "\n".join(f"{path}: {line}" for line in told))
    return 0


def _migrated(path: Path) -> tuple[str, list[str]]:
    try:
        return migrate(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from error


@dataclass(frozen=True)
class ImportOptions:
    files: Annotated[list[str], typer.Argument(metavar="FILE... [key=value...]")]
    """A script or YAML of verl, or both, and then its key=value; a Python script or YAML of TRL;
    TOML files of prime-rl; or a launch script of slime."""
    out: Path | None = None
    """New file to write; not given: it is printed."""


@command("import", "Write our TOML for settings of verl, TRL, prime-rl or slime; it runs nothing.")
def import_files(options: ImportOptions, console: Console) -> int:
    """Exit code: 0, 1 (refused, or what was written does not load yet), 2 (bad input)."""
    if options.out is not None and options.out.exists():
        raise InputError(f"--out {options.out} is there already: name a new file")
    words = [word for word in options.files if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in options.files if word not in words]
    if not paths:
        raise InputError("name a file: a script, YAML or TOML of verl, TRL, prime-rl or slime")
    found = import_settings(read_foreign(paths, words))
    if found.refused:
        for text in found.refused:
            say(console, text)
        return 1
    if options.out is None:
        print(found.toml(), end="", file=console.file)
    else:
        write_whole(options.out, found.toml())
        counts = f"{len(found.mapped)} mapped, {len(found.default_here)} default here, "
        counts += f"{len(found.no_counterpart)} without counterpart, {len(found.unknown)} unknown"
        say(console, f"{options.out}: keys of {found.system}: {counts}")
    if found.fault:
        say(console, f"it does not load yet: {found.fault}")
    return 1 if found.fault else 0


@command("list", "Print the shipped configurations.")
def list_shipped(options: NoOptions, console: Console) -> int:
    table = Table("name", "needs", "what it is", box=None, pad_edge=False)
    for name, path in shipped().items():
        needs = "nothing" if name == "tiny" else ", ".join(_needs(path)) or "nothing"
        table.add_row(name, Text(needs), _headline(path.read_text().splitlines()))
    show_table(console, table)
    return 0


def _needs(path: Path) -> list[str]:
    """Keys that a command line must give, also for missing files."""
    layers = read_layers([path])
    config = resolve(layers)
    keys = [] if "path" in layers.tree.get("model", {}) else ["model.path"]
    sources = [(f"prompts.{n}", one) for n, one in enumerate(config.prompts)]
    sources += [(f"eval.sets.{n}.prompts", one.prompts) for n, one in enumerate(config.eval.sets)]
    for key, source in sources:
        if _lacks_file(source):
            keys.append(f"{key}.path")
    if config.sft.steps and not (config.sft.dataset and config.sft.dataset.exists()):
        keys.append("sft.dataset")
    return keys


def _lacks_file(source: PromptSource) -> bool:
    """Whether a source reads files that are not there, or names none."""
    try:
        kind = read_as(source)
    except InputError:
        return True
    return kind in ("files", "jsonl") and not (source.path and source.path.exists())


def _headline(lines: Sequence[str]) -> str:
    """The first sentence of a file's comment."""
    words = " ".join(line.lstrip("# ") for line in lines[:3] if line.startswith("#"))
    return words.split(". ")[0].rstrip(".")
