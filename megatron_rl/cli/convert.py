"""`megatron-rl convert SRC DST`: converts a model folder."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import DryRun
from megatron_rl.cli.command_line.printing import progress, say
from megatron_rl.config.errors import InputError
from megatron_rl.launcher.hub_models import folder_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConvertOptions:
    source: Annotated[Path, typer.Argument()]
    """Hugging Face, mistral-format or Megatron folder, a model's name on the Hub, or a checkpoint:
    RUN/checkpoints/step_N, RUN/checkpoints/sft/step_N."""
    target: Annotated[Path, typer.Argument()]
    """Folder to make."""
    to: Literal["hf", "megatron"] | None = None
    """Target format; default: the other one."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Dtype of the tensors; default: unchanged."""
    verify: bool = False
    """Read the target again and compare digests."""
    shard_gb: float = 4.0
    """Maximum size of a file, in GB."""
    files_from: Path | None = None
    """Folder with config.json or tokenizer if SOURCE has none."""
    dry_run: DryRun = False


@command("convert", "Convert a model folder to Megatron's format, or back.")
def convert_folder(options: ConvertOptions, console: Console) -> int:
    """Exit code: 0, 1 (the disk failed, or a digest differs), 2 (bad input)."""
    # torch is slow to load.
    from megatron_rl.weights.folders.conversion import Request, VerificationFailed, convert

    if not options.shard_gb > 0:
        raise InputError(f"--shard-gb {options.shard_gb}: give a size above 0")
    request = Request(
        folder_of(options.source, key="SOURCE"),
        options.target,
        to=options.to,
        dtype=options.dtype,
        verify=options.verify,
        shard_bytes=int(options.shard_gb * 1e9),
        files_from=options.files_from,
    )
    is_dry = options.dry_run
    try:
        with progress(console, request.source.name, in_bytes=True) as report:
            done = convert(request, report, is_dry=is_dry)
    except (VerificationFailed, OSError) as failure:
        log.error("%s is not made: %s", request.target, failure)
        return 1
    checked = ", every digest compared" if request.verify and not is_dry else ""
    checked += ". Dry run: nothing was written" if is_dry else ""
    say(
        console,
        f"{request.target}: {done.architecture}, {done.kind} to {done.to}, {done.tensors} tensors, "
        f"{done.size_bytes / 1e9:.3f} GB{checked}",
    )
    return 0
