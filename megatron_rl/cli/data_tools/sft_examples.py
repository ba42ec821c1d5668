"""`megatron-rl data sft`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command, plain_app
from megatron_rl.cli.command_line.parameters import RunFolder
from megatron_rl.cli.command_line.printing import counted, progress
from megatron_rl.cli.data_tools.files import Out, check_output, write_lines
from megatron_rl.curation.rows import read_rows
from megatron_rl.curation.sft_examples import (
    SftExampleOptions,
    mine_sft_examples,
    read_training_rollouts,
)
from megatron_rl.trainer.sft_dataset import read_sft_dataset

app = plain_app()
_DEFAULTS = SftExampleOptions()


@dataclass(frozen=True)
class MiningOptions:
    """Options of the command."""

    run_dir: RunFolder
    out: Out
    prompts: Annotated[
        Path | None, typer.Option(help="the run's prompts, for all their messages")
    ] = None
    instructions: Annotated[Path | None, typer.Option(help="SFT examples to mix in")] = None
    instruction_task: Annotated[
        str | None, typer.Option(help="task of these SFT examples; default: their own")
    ] = None
    template_opens_thoughts: Annotated[
        bool,
        typer.Option(
            "--template-opens-thoughts", help="the chat template ends prompts with <think>"
        ),
    ] = False
    first_step: Annotated[int, typer.Option(help="earlier batches are left out")] = (
        _DEFAULTS.first_step
    )
    min_tokens: Annotated[int, typer.Option(help="of a completion")] = _DEFAULTS.min_tokens
    per_problem: Annotated[int, typer.Option(help="most SFT examples of a problem")] = (
        _DEFAULTS.per_problem
    )
    upsample_below: Annotated[
        float, typer.Option(help="pass rate below which SFT examples are repeated")
    ] = _DEFAULTS.upsample_below
    max_copies: Annotated[int, typer.Option(help="most times that an SFT example is there")] = (
        _DEFAULTS.max_copies
    )
    instruction_share: Annotated[float, typer.Option(help="of the output")] = (
        _DEFAULTS.instruction_share
    )
    epochs: Annotated[int, typer.Option(help="of the cold start; for the report")] = (
        _DEFAULTS.epochs
    )
    batch_size: Annotated[int, typer.Option(help="of the cold start; for the report")] = (
        _DEFAULTS.batch_size
    )
    seed: int = _DEFAULTS.seed


@command(app, "sft", "Mine a run for SFT examples of a cold start.")
def examples(options: MiningOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    wanted = SftExampleOptions(
        **{f.name: getattr(options, f.name) for f in fields(SftExampleOptions)}
    )
    check_output(options)
    given = [] if options.instructions is None else read_sft_dataset(options.instructions)
    if options.instruction_task is not None:
        given = [
            msgspec.structs.replace(example, task=options.instruction_task) for example in given
        ]
    rows = [] if options.prompts is None else read_rows(options.prompts)
    with progress(console, "rollouts read") as report_on:
        mined = list(counted(read_training_rollouts(options.run_dir), None, report_on))
    found, report = mine_sft_examples(
        mined,
        instructions=given,
        prompts={row.prompt.id: row.prompt for row in rows},
        options=wanted,
    )
    return write_lines(options.out, found, report, console)
