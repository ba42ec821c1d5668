"""`megatron-rl rehearse`: a training step of every distinct rank, without GPUs."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, check_above_zero
from megatron_rl.cli.plan import SizesOptions
from megatron_rl.cli.run import KEYS_HELP
from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import DEFAULT, GPUS, find_gpu
from megatron_rl.config.tree import Config

if TYPE_CHECKING:
    from megatron_rl.rehearsal.rehearse import Rehearsal


class Ranks(StrEnum):
    """Which ranks are rehearsed."""

    SAMPLE = "sample"
    ALL = "all"


@dataclass(frozen=True)
class RehearseOptions(SizesOptions):
    gpus: int | None = None
    """GPUs of the trainer: sets parallel.data; default: as configured."""
    ranks: Ranks = Ranks.SAMPLE
    """Ranks that take the step: of each stage those at both ends of other dimensions, or all."""
    microbatches: int | None = None
    """Microbatches of each data-parallel rank; default: as planned, at most 2 * stages + 1."""
    mean_tokens: int | None = None
    """Mean tokens of a sequence; default: half of generator.context_tokens."""
    gpu: Annotated[
        str,
        typer.Option(
            help=f"GPU of the trainer: its memory must hold the step. One of {', '.join(GPUS)}.",
            autocompletion=lambda: list(GPUS),
        ),
    ] = DEFAULT
    processes: int = 2
    """Number of ranks rehearsed at once."""
    timeline: Path | None = None
    """Also write a timeline of the rehearsed ranks for ui.perfetto.dev."""
    json: Json = False


@command("rehearse", "Take a step of every distinct rank, without GPUs.", epilog=KEYS_HELP)
def rehearse(options: RehearseOptions, console: Console) -> int:
    """Exit code: 0, 1 (the step would hang, fail or not fit), 2 (bad input)."""
    check_above_zero(options, "gpus", "microbatches", "mean_tokens", "processes")
    find_gpu(options.gpu)
    config = options.load()
    config = _divided(config, options.gpus)
    from megatron_rl.rehearsal.rehearse import Options
    from megatron_rl.rehearsal.rehearse import rehearse as take
    from megatron_rl.rehearsal.report import print_rehearsal
    from megatron_rl.rehearsal.timeline import as_perfetto

    found = take(
        config,
        Options(
            choice=options.ranks.value,
            microbatches=options.microbatches,
            mean_tokens=options.mean_tokens,
            processes=options.processes,
            gpu=options.gpu,
        ),
    )
    found = _with_engine(found, config)
    if options.timeline is not None:
        options.timeline.write_text(as_perfetto(found.clock))
    print_rehearsal(found, console, as_json=options.json)
    return 1 if found.problems else 0


def _with_engine(found: "Rehearsal", config: Config) -> "Rehearsal":
    """The same with what is known of the engines that the trainer's weights go to."""
    # torch is slow to load.
    from generation.rehearsed_engine import check_engine
    from megatron_rl.weights.layout.shape import read_shape

    if config.generator.engine != "sglang":
        note = f"generator.engine={config.generator.engine!r} is not rehearsed"
        return replace(found, notes=(*found.notes, note))
    problems = check_engine(config, read_shape(config.model.path))
    return replace(found, problems=(*found.problems, *problems))


def _divided(config: Config, gpus: int | None) -> Config:
    """The configuration with as many data-parallel ranks as these GPUs make. Raises InputError."""
    if gpus is None:
        return config
    parallel = config.parallel
    replica = parallel.tensor * parallel.pipeline * parallel.context
    if gpus % replica:
        raise InputError(
            f"--gpus {gpus} is no multiple of parallel.tensor x pipeline x context = {replica}"
        )
    data = {"data": gpus // replica}
    return config.model_copy(update={"parallel": parallel.model_copy(update=data)})
