"""`megatron-rl plan`: what a run needs; `plan-weights`: what a weight sync moves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import (
    ConfigFile,
    Json,
    MoreConfigs,
    Overrides,
    check_above_zero,
)
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


@dataclass(frozen=True)
class SizesOptions:
    """Options of `plan`, `plan-weights`, `rehearse` and `simulate`."""

    config: ConfigFile = ""
    overrides: Overrides = field(default_factory=list)
    more: MoreConfigs = field(default_factory=list)

    def load(self, overrides: Sequence[str] = ()) -> Config:
        """The configuration; downloads config.json of a Hub model. Raises InputError.

        overrides: further ones.
        """
        files, given = [self.config] if self.config else [], [*self.overrides, *overrides]
        # With --config alone, the first word is an override.
        if self.more and "=" in self.config and not Path(self.config).exists():
            files, given = [], [self.config, *given]
        if not (files := [*files, *self.more]):
            raise InputError(
                "no configuration is given: name a TOML file or a shipped configuration "
                "(`megatron-rl config list`), as the first word or by --config"
            )
        if wrong := [word for word in given if "=" not in word]:
            raise InputError(
                f"{wrong[0]} is no override section.key=value: give a further file by --config "
                f"{wrong[0]}"
            )
        config = load_config([config_path(name) for name in files], given)
        return pin_models(config, None, only_sizes=True)


@dataclass(frozen=True)
class PlanOptions(SizesOptions):
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"GPU, one of {', '.join(GPUS)}, or any name with --gpu-memory; default: that of "
            f"this node, or {DEFAULT} without one.",
            autocompletion=lambda: list(GPUS),
        ),
    ] = None
    gpu_memory: float | None = None
    """Memory of the GPU in GiB; default: that of --gpu."""
    gpus: int | None = None
    """GPUs of the whole run; default: as many as the configuration uses."""
    mfu: float = Hardware.mfu
    """Model FLOPs utilization of the trainer."""
    mean_tokens: int | None = None
    """Mean tokens of a sequence; default: half of generator.context_tokens."""
    gb_per_s: float | None = None
    """Bandwidth of a rank in a weight sync; default: 25, with weights.method=folder 2."""
    json: Json = False


@command("plan", "Say what a run needs, and whether it fits its GPUs.", epilog=KEYS_HELP)
def plan(options: PlanOptions, console: Console) -> int:
    """Exit code: 0, 1 (it does not work on a GPU of the table), 2 (bad input)."""
    check_above_zero(options, "gpus", "gpu_memory", "mfu", "mean_tokens", "gb_per_s")
    rate = None if options.gb_per_s is None else options.gb_per_s * 1e9
    listed = None if options.gpu else listed_card()
    card = choose_card(options.gpu, options.gpu_memory, listed)
    hardware = Hardware(card, options.gpus, options.mfu, rate)
    config = options.load()
    made = make_plan(config, hardware, options.mean_tokens)
    print_plan(made, console, as_json=options.json)
    return 1 if made.problems and made.is_known_gpu else 0


@command("plan-weights", "Say what a weight sync moves between which ranks.", epilog=KEYS_HELP)
def plan_weights(options: SizesOptions, console: Console) -> int:
    # torch is slow to load.
    from megatron_rl.cli.plan_weights import plan_weights as show

    show(options.load(), console)
    return 0
