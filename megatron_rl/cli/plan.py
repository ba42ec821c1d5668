"""`megatron-rl plan`: what a run needs; `plan-weights`: what a weight sync moves."""

from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command, plain_app
from megatron_rl.cli.command_line.parameters import ConfigFile, Json, Overrides, complete_config
from megatron_rl.cli.run import KEYS_HELP
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import DEFAULT, GPUS
from megatron_rl.config.shipped import config_path
from megatron_rl.config.tree import Config
from megatron_rl.launcher.hub_models import pin_models
from megatron_rl.plan.card import choose_card, listed_card
from megatron_rl.plan.plan import Hardware, make_plan
from megatron_rl.plan.report import print_plan

app = plain_app()


@dataclass(frozen=True)
class PlanOptions:
    """Options of `plan`."""

    config: ConfigFile
    overrides: Overrides = field(default_factory=list)
    more: Annotated[
        list[str],
        typer.Option(
            "--config",
            metavar="FILE",
            show_default=False,
            autocompletion=complete_config,
            help="further TOML files, of which later ones win",
        ),
    ] = field(default_factory=list)
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"one of {', '.join(GPUS)}, or any name with --gpu-memory; default: the GPU of "
            f"this host, or {DEFAULT} without one",
            autocompletion=lambda: list(GPUS),
        ),
    ] = None
    gpu_memory: Annotated[
        float | None, typer.Option(help="memory of the GPU in GiB; default: that of --gpu")
    ] = None
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of the whole run; default: what the config uses")
    ] = None
    mfu: Annotated[float, typer.Option(help="model FLOPs utilization of the trainer")] = (
        Hardware.mfu
    )
    mean_tokens: Annotated[
        int | None,
        typer.Option(help="mean tokens of a sequence; default: half of generator.context_tokens"),
    ] = None
    gb_per_s: Annotated[
        float | None,
        typer.Option(
            help="bandwidth of a rank in a weight sync; default: 25, with weights.method=host 2"
        ),
    ] = None
    json: Json = False


@command(app, "plan", "Say what a run needs, and whether it fits its GPUs.", epilog=KEYS_HELP)
def plan(options: PlanOptions, console: Console) -> int:
    """Exit code: 0, 1 (it does not work on a GPU of the table), 2 (bad input)."""
    for name in ("gpus", "gpu_memory", "mfu", "mean_tokens", "gb_per_s"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} {value} must be above 0")
    rate = None if options.gb_per_s is None else options.gb_per_s * 1e9
    listed = None if options.gpu else listed_card()
    card = choose_card(options.gpu, options.gpu_memory, listed)
    hardware = Hardware(
        gpu=card.gpu, card=card.name, memory_bytes=card.memory_bytes,
        gpus=options.gpus, mfu=options.mfu, bytes_per_s=rate,
    )  # fmt: skip
    config = _load([options.config, *options.more], options.overrides)
    made = make_plan(config, hardware, options.mean_tokens)
    print_plan(made, console, as_json=options.json)
    return 1 if made.problems and made.is_known_gpu else 0


@dataclass(frozen=True)
class WeightsOptions:
    """Options of `plan-weights`."""

    config: ConfigFile
    overrides: Overrides = field(default_factory=list)


@command(app, "plan-weights", "Say what a weight sync moves between which ranks.", epilog=KEYS_HELP)
def plan_weights(options: WeightsOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    # torch is slow to load.
    from megatron_rl.cli.plan_weights import plan_weights as show

    show(_load([options.config], options.overrides), console)
    return 0


def _load(configs: list[str], overrides: list[str]) -> Config:
    """The configuration; downloads config.json of a Hub model. Raises InputError."""
    return pin_models(
        load_config([config_path(name) for name in configs], overrides), None, only_sizes=True
    )
