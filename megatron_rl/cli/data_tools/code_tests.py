"""`megatron-rl data code-tests`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import OneConfig
from megatron_rl.cli.command_line.printing import progress
from megatron_rl.cli.data_tools.files import (
    ToolOptions,
    check_output,
    part_of,
    read_config,
    read_prompts,
    write_rows,
)
from megatron_rl.curation.code_tests import (
    SENTENCES,
    CodeTestOptions,
    check_sandbox,
    check_tests,
    run_on_tests,
)
from megatron_rl.curation.samples import read_solutions
from megatron_rl.curation.tool import check_at_least
from verification.comparisons import code_limits


@dataclass(frozen=True, kw_only=True)
class Options(CodeTestOptions, ToolOptions):
    solutions: Path
    """Folder with rollouts, a file of rollouts, or JSONL of {id, language, source}."""
    task: str = "code"
    """Task of rows without a task."""
    config: OneConfig = None
    workers: int = os.cpu_count() or 1
    """Number of processes."""
    languages: Annotated[list[str], typer.Option(metavar="[NAME...]")] = field(
        default_factory=lambda: list(SENTENCES)
    )


@command("code-tests", "Validate test cases by running solutions.")
def code_tests(options: Options, console: Console) -> int:
    check_at_least("--workers", options.workers, 1)
    check_output(options)
    rows = read_prompts(options)
    config = read_config(options.config)
    solutions = read_solutions(options.solutions, config.reward, tags=config.render.tags)
    limits = check_sandbox(code_limits(config.reward))
    with progress(console, "solutions") as report_on:
        printed, counts = run_on_tests(
            rows, solutions, limits, workers=options.workers, progress=report_on
        )
    kept, report = check_tests(
        rows, printed, options=part_of(CodeTestOptions, options), counts=counts
    )
    return write_rows(options.out, kept, report, console)
