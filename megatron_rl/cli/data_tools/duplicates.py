"""`megatron-rl data dedupe` and `data decontaminate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import Several, command
from megatron_rl.cli.command_line.groups import plain_app
from megatron_rl.cli.command_line.progress import progress
from megatron_rl.cli.data_tools.files import (
    DatasetSplit,
    Out,
    Prompts,
    Subset,
    Task,
    check_output,
    read_prompts,
    write_rows,
)
from megatron_rl.curation.duplicates import DEFAULT_THRESHOLD, decontaminate, dedupe
from megatron_rl.curation.rows import read_rows

app = plain_app()


@dataclass(frozen=True)
class DedupeOptions:
    """What `data dedupe` is given."""

    prompts: Prompts
    out: Out
    task: Task = "math"
    subset: Subset = ""
    dataset_split: DatasetSplit = ""
    threshold: float = DEFAULT_THRESHOLD


@command(app, "dedupe", "Drop near duplicates within a file.")
def dedupe_file(options: DedupeOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    check_output(options)
    rows = read_prompts(options)
    with progress(console, "problems") as report_on:
        kept, report = dedupe(rows, threshold=options.threshold, progress=report_on)
    return write_rows(options.out, kept, report, console)


@dataclass(frozen=True)
class DecontaminateOptions:
    """What `data decontaminate` is given."""

    prompts: Prompts
    out: Out
    against: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="evaluation problems"),
        Several(),
    ]
    task: Task = "math"
    subset: Subset = ""
    dataset_split: DatasetSplit = ""
    threshold: float = DEFAULT_THRESHOLD


@command(app, "decontaminate", "Drop what evaluations ask.")
def decontaminate_file(options: DecontaminateOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    check_output(options)
    rows = read_prompts(options)
    evaluations = [row for path in options.against for row in read_rows(path, task=options.task)]
    with progress(console, "problems") as report_on:
        kept, report = decontaminate(
            rows, evaluations, threshold=options.threshold, progress=report_on
        )
    return write_rows(options.out, kept, report, console)
