"""Input, output and reports of the tools of `megatron-rl data`.

A report is printed as a table and written to OUT.report.json.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import InputError, printable
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import config_path
from megatron_rl.config.tree import Config
from megatron_rl.curation.rows import Row, encode_lines, read_rows
from megatron_rl.curation.tool import Report
from megatron_rl.data.tables.rows import RowFault
from megatron_rl.protocol.whole_file import write_whole

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Options of every tool that reads a file of prompts."""

    prompts: Annotated[Path, typer.Argument()]
    """File or folder of prompts, as for a run."""
    out: Path
    """JSONL file to write."""
    task: str = "math"
    """Task of rows without a task."""
    subset: str = ""
    """Subset of a folder with several."""
    dataset_split: str = ""
    """Split of a folder with several."""


def part_of(kind: type[Kind], options: Any) -> Kind:
    """The options of a tool among a command's options."""
    return kind(**{one.name: getattr(options, one.name) for one in fields(kind)})


def read_prompts(
    options: ToolOptions, left_out: dict[str, list[RowFault]] | None = None
) -> list[Row]:
    """The rows of the input; left_out as for `read_rows`. Raises InputError."""
    return read_rows(
        options.prompts,
        task=options.task,
        subset=options.subset,
        split=options.dataset_split,
        left_out=left_out,
    )


def read_config(name: str | None) -> Config:
    """The configuration with the tasks; default: ours. Raises ConfigError."""
    return load_config(None if name is None else config_path(name), [])


def check_output(options: Any) -> None:
    """Raise InputError for an output without a folder, or that is a folder or an input."""
    if options.out.is_dir():
        raise InputError(f"--out {options.out} is a folder: name a file in it, as NAME.jsonl")
    folder = options.out.resolve().parent
    if not folder.is_dir():
        raise InputError(f"--out {options.out}: there is no folder {folder}")
    given: list[Any] = []
    for name, value in vars(options).items():
        if name != "out":
            given += value if isinstance(value, list) else [value]
    files = [value for value in given if isinstance(value, Path)]
    if any(file.resolve() == options.out.resolve() for file in files):
        raise InputError(f"--out {options.out} is a file that is read: name another one")


def write_rows(out: Path, rows: list[Row], report: Report, console: Console) -> int:
    """Write prompts and report, and print the counts; exit code 0."""
    return write_lines(out, [row.line() for row in rows], report, console)


def write_lines(out: Path, lines: list[Any], report: Report, console: Console) -> int:
    """Write lines and report, and print the counts; exit code 0."""
    write_whole(out, encode_lines(lines))
    beside = out.with_name(f"{out.name}.report.json")
    write_whole(beside, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    print_report(report, console)
    say(console, f"{out}, {beside}")
    return 0


def print_report(report: Report, console: Console) -> None:
    table = Table(f"data {report.tool}", "rows")
    table.add_row("read", str(report.read))
    for kind, counts in (
        ("dropped", report.dropped), ("added", report.added), ("changed", report.changed)
    ):  # fmt: skip
        for name, count in counts.items():
            table.add_row(f"{kind}: {printable(name)}", str(count))
    table.add_row("written", str(report.written))
    for name, value in report.figures.items():
        if isinstance(value, list):
            continue  # Of rows: in the file alone.
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name, printable(shown))
    show_table(console, table)
