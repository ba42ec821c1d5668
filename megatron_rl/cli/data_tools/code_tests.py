"""`megatron-rl data code-tests`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command, plain_app
from megatron_rl.cli.command_line.parameters import OneConfig
from megatron_rl.cli.command_line.printing import progress
from megatron_rl.cli.data_tools.files import (
    ToolOptions,
    check_output,
    read_config,
    read_prompts,
    write_rows,
)
from megatron_rl.curation.code_tests import (
    CodeTestOptions,
    check_sandbox,
    check_tests,
    run_on_tests,
)
from megatron_rl.curation.samples import read_solutions
from megatron_rl.curation.tool import check_at_least
from verification.comparisons import code_limits

app = plain_app()
_DEFAULTS = CodeTestOptions()


@dataclass(frozen=True, kw_only=True)
class Options(ToolOptions):
    """Options of the command."""

    solutions: Annotated[
        Path,
        typer.Option(
            help="folder with rollouts, a file of rollouts, or JSONL of {id, language, source}"
        ),
    ]
    task: Annotated[str, typer.Option(help="task of rows that name none")] = "code"
    config: OneConfig = None
    workers: Annotated[int, typer.Option(help="number of processes")] = os.cpu_count() or 1
    languages: Annotated[
        list[str],
        typer.Option(metavar="[NAME...]", help="languages of solutions; no name: any language"),
    ] = field(default_factory=lambda: list(_DEFAULTS.languages))
    min_solutions: int = _DEFAULTS.min_solutions
    agreement: float = _DEFAULTS.agreement
    relabel_agreement: float = _DEFAULTS.relabel_agreement
    min_tests: int = _DEFAULTS.min_tests


@command(app, "code-tests", "Validate test cases by running solutions.")
def code_tests(options: Options, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    wanted = CodeTestOptions(
        min_solutions=options.min_solutions,
        agreement=options.agreement,
        relabel_agreement=options.relabel_agreement,
        min_tests=options.min_tests,
        languages=tuple(name for name in options.languages if name),
    )
    check_at_least("--workers", options.workers, 1)
    check_output(options)
    rows = read_prompts(options)
    config = read_config(options.config)
    solutions = read_solutions(options.solutions, config.reward)
    limits = check_sandbox(code_limits(config.reward))
    with progress(console, "solutions") as report_on:
        printed, counts = run_on_tests(
            rows, solutions, limits, workers=options.workers, progress=report_on
        )
    kept, report = check_tests(rows, printed, options=wanted, counts=counts)
    return write_rows(options.out, kept, report, console)
