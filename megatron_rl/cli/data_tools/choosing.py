"""`megatron-rl data difficulty` and `data filter-format`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import Several, command
from megatron_rl.cli.command_line.groups import plain_app
from megatron_rl.cli.command_line.parameters import OneConfig
from megatron_rl.cli.data_tools.files import (
    DatasetSplit,
    Out,
    Prompts,
    Subset,
    Task,
    check_output,
    read_config,
    read_prompts,
    write_rows,
)
from megatron_rl.curation.difficulty import (
    DifficultyOptions,
    LabelRules,
    filter_difficulty,
    open_classes,
)
from megatron_rl.curation.format_filter import filter_format
from megatron_rl.curation.samples import read_samples

app = plain_app()
_RULES, _LIMITS = LabelRules(), DifficultyOptions()


@dataclass(frozen=True)
class ChoiceOptions:
    """What `data difficulty` is given."""

    prompts: Prompts
    out: Out
    samples: Annotated[
        Path,
        typer.Option(
            help="folder with rollouts, a file of them, or JSONL of {id, correct, answers}"
        ),
    ]
    task: Task = "math"
    subset: Subset = ""
    dataset_split: DatasetSplit = ""
    label: Annotated[str, typer.Option(help="one evaluation of the folder of samples")] = ""
    config: OneConfig = None
    labels: Literal["keep", "drop", "relabel"] = _RULES.action
    label_share: float = _RULES.label_share
    max_label_share: float = _RULES.max_label_share
    relabel_share: float = _RULES.relabel_share
    above: float = _LIMITS.above
    up_to: float = _LIMITS.up_to
    min_samples: int = _LIMITS.min_samples


@command(app, "difficulty", "Keep what is neither too hard nor too easy.")
def difficulty(options: ChoiceOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    rules = LabelRules(
        action=options.labels,
        label_share=options.label_share,
        max_label_share=options.max_label_share,
        relabel_share=options.relabel_share,
    )
    wanted = DifficultyOptions(options.above, options.up_to, options.min_samples, rules)
    check_output(options)
    rows = read_prompts(options)
    config = read_config(options.config)
    samples = read_samples(options.samples, config.reward, label=options.label)
    with open_classes(config.reward, config.verifier) as classify:
        kept, report = filter_difficulty(
            rows, samples, options=wanted, reward=config.reward, classify=classify
        )
    return write_rows(options.out, kept, report, console)


@dataclass(frozen=True)
class FormatOptions:
    """What `data filter-format` is given."""

    prompts: Prompts
    out: Out
    task: Task = "math"
    subset: Subset = ""
    dataset_split: DatasetSplit = ""
    tasks: Annotated[list[str], typer.Option(metavar="NAME...", help="to filter"), Several()] = (
        field(default_factory=lambda: ["math"])
    )


@command(app, "filter-format", "Leave one comparable answer a problem.")
def filter_file(options: FormatOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    check_output(options)
    rows = read_prompts(options)
    kept, report = filter_format(rows, tasks=options.tasks)
    return write_rows(options.out, kept, report, console)
