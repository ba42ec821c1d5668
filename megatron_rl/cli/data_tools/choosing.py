"""`megatron-rl data difficulty`, `filter-format`, `dedupe`, `decontaminate` and `code-tests`: tools
that leave prompts out.
"""

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
from megatron_rl.curation.difficulty import DifficultyOptions, filter_difficulty, open_classes
from megatron_rl.curation.duplicates import DEFAULT_THRESHOLD, decontaminate, dedupe
from megatron_rl.curation.format_filter import filter_format
from megatron_rl.curation.rows import read_rows
from megatron_rl.curation.samples import read_samples, read_solutions
from megatron_rl.curation.tool import check_at_least
from megatron_rl.data.tables.rows import RowFault
from verification.comparisons import code_limits


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(DifficultyOptions, ToolOptions):
    samples: Path
    """Folder with rollouts, a file of rollouts, or JSONL of {id, correct, answers}."""
    label: str = ""
    """Name of one evaluation in the folder of samples."""
    config: OneConfig = None


@command("difficulty", "Keep prompts that are neither too hard nor too easy.")
def difficulty(options: ChoiceOptions, console: Console) -> int:
    check_output(options)
    rows = read_prompts(options)
    config = read_config(options.config)
    samples = read_samples(
        options.samples, config.reward, label=options.label, tags=config.render.tags
    )
    with open_classes(config.reward, config.verifier) as classify:
        kept, report = filter_difficulty(
            rows,
            samples,
            options=part_of(DifficultyOptions, options),
            reward=config.reward,
            classify=classify,
        )
    return write_rows(options.out, kept, report, console)


@dataclass(frozen=True, kw_only=True)
class FormatOptions(ToolOptions):
    tasks: Annotated[list[str], typer.Option(metavar="NAME...")] = field(
        default_factory=lambda: ["math"]
    )
    """Tasks to filter."""


@command("filter-format", "Keep problems with one answer that can be compared.")
def filter_file(options: FormatOptions, console: Console) -> int:
    check_output(options)
    faulty: list[RowFault] = []
    rows = read_prompts(options, left_out={"no_answer": faulty})
    kept, report = filter_format(rows, tasks=options.tasks, faulty=faulty)
    return write_rows(options.out, kept, report, console)


@dataclass(frozen=True, kw_only=True)
class DedupeOptions(ToolOptions):
    threshold: float = DEFAULT_THRESHOLD


@command("dedupe", "Drop near duplicates within a file.")
def dedupe_file(options: DedupeOptions, console: Console) -> int:
    check_output(options)
    rows = read_prompts(options)
    with progress(console, "problems") as report_on:
        kept, report = dedupe(rows, threshold=options.threshold, progress=report_on)
    return write_rows(options.out, kept, report, console)


@dataclass(frozen=True, kw_only=True)
class DecontaminateOptions(DedupeOptions):
    against: Annotated[list[Path], typer.Option(metavar="FILE...")]
    """Evaluation problems."""


@command("decontaminate", "Drop problems that evaluations ask.")
def decontaminate_file(options: DecontaminateOptions, console: Console) -> int:
    check_output(options)
    rows = read_prompts(options)
    evaluations = [row for path in options.against for row in read_rows(path, task=options.task)]
    with progress(console, "problems") as report_on:
        kept, report = decontaminate(
            rows, evaluations, threshold=options.threshold, progress=report_on
        )
    return write_rows(options.out, kept, report, console)


@dataclass(frozen=True, kw_only=True)
class ValidationOptions(CodeTestOptions, ToolOptions):
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
def code_tests(options: ValidationOptions, console: Console) -> int:
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
