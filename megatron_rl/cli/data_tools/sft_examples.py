"""`megatron-rl data sft`."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import RunFolder
from megatron_rl.cli.command_line.printing import counted, progress
from megatron_rl.cli.data_tools.files import check_output, part_of, write_lines
from megatron_rl.config.files import load_run
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.curation.rows import read_rows
from megatron_rl.curation.sft_examples import (
    SftExampleOptions,
    mine_sft_examples,
    read_training_rollouts,
)
from megatron_rl.trainer.sft_dataset import read_sft_dataset


@dataclass(frozen=True, kw_only=True)
class MiningOptions(SftExampleOptions):
    run_dir: RunFolder
    out: Path
    """JSONL file to write."""
    prompts: Path | None = None
    """The run's prompts, for all their messages."""
    instructions: Path | None = None
    """SFT examples to mix in."""
    instruction_task: str | None = None
    """Task of the SFT examples to mix in; default: their own."""


@command("sft", "Mine a run for SFT examples of a cold start.")
def examples(options: MiningOptions, console: Console) -> int:
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
        prompts=[row.prompt for row in rows],
        options=part_of(SftExampleOptions, options),
        tags=_tags_of(options.run_dir),
    )
    return write_lines(options.out, found, report, console)


def _tags_of(run_dir: Path) -> ThinkTags:
    """Think tags of a run; those of the house for a folder that has only rollouts."""
    has_config = (run_dir / "config.toml").is_file()
    return load_run(run_dir).render.tags if has_config else HOUSE_TAGS
