"""`megatron-rl report RUN...`: summaries as text, and one HTML file."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import complete_run_folder
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run
from megatron_rl.observe.facts import read_summary, run_facts
from megatron_rl.observe.missing_records import warn_of_missing
from megatron_rl.observe.report.material import read_material
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.observe.summary_text import render_text
from megatron_rl.protocol.metrics import stream_rows
from megatron_rl.protocol.whole_file import write_whole

FILE = "report.html"


@dataclass(frozen=True)
class ReportOptions:
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR", autocompletion=complete_run_folder)
    ]
    """Folders of runs."""
    html: Annotated[
        Path | None, typer.Option(help=f"HTML file to write; default: {FILE} in the first folder.")
    ] = None
    trace: Path | None = None
    """Also write a timeline of a single run for ui.perfetto.dev."""
    text: bool = False
    """Print only the summary."""


@command("report", "Summarize runs as text and as an HTML file.")
def report(options: ReportOptions, console: Console) -> int:
    if options.trace is not None and len(options.run_dirs) > 1:
        raise InputError("--trace takes one run: each has its own clock")
    path = options.html or options.run_dirs[0] / FILE
    if not options.text:
        _check_writable(options.run_dirs, path, options.trace)
    texts = [render_text(*read_run(folder)) for folder in options.run_dirs]
    for folder, text in zip(options.run_dirs, texts, strict=True):
        if not options.text or not (folder / "summary.json").exists():
            warn_of_missing(folder)
        if len(texts) > 1:
            say(console, f"\n{folder}")
        say(console, text)
    if not options.text:
        write_report(options.run_dirs, texts, path, trace=options.trace)
        say(console, f"Report              {path}")
    return 0


def _check_writable(run_dirs: list[Path], path: Path, trace: Path | None) -> None:
    """Raise InputError for a folder without a run, or a file that cannot be written."""
    for folder in run_dirs:
        load_run(folder)
    for file, fix in (
        (path, "--html FILE elsewhere, or --text"),
        (trace, "--trace FILE elsewhere"),
    ):
        if file is None:
            continue
        folder = file.resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"cannot write {file}: {folder} is no writable folder; give {fix}")


def write_report(
    folders: list[Path], texts: list[str], path: Path, *, trace: Path | None = None
) -> None:
    """Write the HTML file. texts: the summary of each run."""
    # Plotly takes a second to load.
    from megatron_rl.observe.report import figures, timeline
    from megatron_rl.observe.report.page import render

    names = run_names(folders)
    runs = [
        read_material(folder, load_run(folder), name)
        for folder, name in zip(folders, names, strict=True)
    ]
    lines = [plot for run in runs if (plot := timeline.plot(run)) is not None]
    write_whole(path, render(runs, texts, timelines=lines, plots=figures.plots(runs)))
    if trace is not None:
        write_whole(trace, timeline.trace(runs[0]))


def run_names(folders: list[Path]) -> list[str]:
    """Names of runs: their folders, with the parent folder for equal names."""
    paths = [folder.resolve() for folder in folders]
    counts = Counter(path.name for path in paths)
    return [p.name if counts[p.name] == 1 else f"{p.parent.name}/{p.name}" for p in paths]


def read_run(run_dir: Path) -> tuple[dict, RunFacts]:
    """(summary, facts) of a run folder; the summary of an unfinished run is made from its metrics.

    Raises InputError for a folder without a run.
    """
    config = load_run(run_dir)
    summary_path = run_dir / "summary.json"
    if summary_path.exists():
        # The folder may have moved since, and models may have been deleted.
        summary = read_summary(run_dir)
        if not isinstance(summary.get("wall_s"), dict):
            raise InputError(f"{summary_path} is no summary of a run: expected wall_s in it")
        facts = run_facts(config, run_dir, summary["wall_s"])
        return summary | {"hf_export": facts.hf_export}, facts
    facts = run_facts(config, run_dir, {})
    return summarize(stream_rows(run_dir / "metrics.jsonl"), facts), facts
