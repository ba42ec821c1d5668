"""Options and arguments that several commands have. Used by the modules of commands."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.cli.command_line.completion import (
    complete_config,
    complete_override,
    complete_run_folder,
)

_KEYS = "change single keys, anywhere on the line; `megatron-rl config` lists all"
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="section.key=value", help=_KEYS, autocompletion=complete_override,
        show_default=False,
    ),
]  # fmt: skip
ConfigFile = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file, or the name of a shipped one",
        autocompletion=complete_config,
    ),
]
ConfigFiles = Annotated[
    list[str],
    typer.Option(
        "--config", metavar="FILE", show_default=False, autocompletion=complete_config,
        help="TOML file, or the name of a shipped one; of several, later ones win",
    ),
]  # fmt: skip
OneConfig = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="TOML file, or the name of a shipped one",
        autocompletion=complete_config,
    ),
]  # fmt: skip
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN_DIR", help="folder of the run", autocompletion=complete_run_folder),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="run folder; the same as run.dir=DIR",
        autocompletion=complete_run_folder,
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check everything, say what would be done, start nothing")
]
