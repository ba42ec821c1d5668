"""Options and arguments of several commands, and their shell completions.

A shell waits for completions, so functions import only what they need, at most the configuration
tree. Without an offer bash completes file names.
"""

import functools
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_rl.config.errors import InputError

_QUOTED = re.compile(r'"([^"]*)"')


def complete_override(incomplete: str) -> list[str]:
    """Keys with `=`; after it, the values of a key with a fixed set of values."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _values_of(key)]
    return [f"{name}=" for name in complete_key(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys that begin with this text, with list indices and user's names as typed."""
    typed = incomplete.split(".")
    keys = (_as_typed(key.split("."), typed) for key in _kinds())
    return sorted(key for key in keys if key.startswith(incomplete))


def _values_of(key: str) -> list[str]:
    """The fixed set of a key's values, such as names of presets; [] for other keys."""
    from megatron_rl.config.presets import PRESETS

    if key == "algorithm.preset":
        return list(PRESETS)
    kinds = (
        kind for one, kind in _kinds().items() if _as_typed(one.split("."), key.split(".")) == key
    )
    kind = next(kinds, "")
    return ["true", "false"] if kind == "true or false" else _QUOTED.findall(kind)


@functools.cache
def _kinds() -> dict[str, str]:
    """Key -> allowed values."""
    from megatron_rl.config.reference import tables

    return {entry.key: entry.kind for table in tables() for entry in table.entries}


def _as_typed(parts: list[str], typed: list[str]) -> str:
    """The key with a typed index for 0, and a typed name for NAME."""
    given = [*typed, *parts[len(typed) :]]
    return ".".join(
        text if text and (part == "NAME" or (part == "0" and text.isdigit())) else part
        for part, text in zip(parts, given, strict=False)
    )


def complete_config(incomplete: str) -> list[str]:
    from megatron_rl.config.shipped import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def complete_run_folder(incomplete: str) -> list[str]:
    """Folders of runs in runs/."""
    found = sorted(str(path.parent) for path in Path("runs").glob("*/config.toml"))
    return [name for name in found if name.startswith(incomplete)]


def check_above_zero(options: Any, *names: str) -> None:
    """Raise InputError for an option that is given and not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} {value} must be above 0")


_FILE_HELP = "TOML file, or the name of a shipped configuration."
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="section.key=value", autocompletion=complete_override, show_default=False,
        help="Changes of single keys; `megatron-rl config` lists all keys.",
    ),
]  # fmt: skip
ConfigFile = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help=_FILE_HELP, autocompletion=complete_config, show_default=False
    ),
]
ConfigFiles = Annotated[
    list[str],
    typer.Option(
        "--config", metavar="FILE", show_default=False, autocompletion=complete_config,
        help=f"{_FILE_HELP} Later files win.",
    ),
]  # fmt: skip
MoreConfigs = Annotated[
    list[str],
    typer.Option(
        "--config", metavar="FILE", show_default=False, autocompletion=complete_config,
        help=f"{_FILE_HELP} Later files win, over CONFIG too.",
    ),
]  # fmt: skip
OneConfig = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help=_FILE_HELP, autocompletion=complete_config),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Run folder.", autocompletion=complete_run_folder)
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="Run folder; the same as run.dir=DIR.",
        autocompletion=complete_run_folder,
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")
]
