"""`megatron-rl eval [MODEL] --config FILE` and `megatron-rl eval --compare A B`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import (
    ConfigFiles,
    DryRun,
    Json,
    RunDirOption,
    complete_override,
)
from megatron_rl.cli.command_line.printing import say
from megatron_rl.cli.run import KEYS_HELP
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.shipped import config_path
from megatron_rl.evaluation.runs.comparing import compare_folders
from megatron_rl.evaluation.runs.tables import print_comparison
from megatron_rl.observe.deaths import until_death

_EXAMPLES = """Examples:

megatron-rl eval runs/mine/hf/final --config my.toml --run-dir runs/mine-eval

megatron-rl eval --compare runs/base-eval runs/mine-eval

"""


@dataclass(frozen=True)
class EvalOptions:
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL | section.key=value",
            autocompletion=complete_override,
            show_default=False,
        ),
    ] = field(default_factory=list)
    """Hugging Face folder; default: model.path."""
    config: ConfigFiles = field(default_factory=list)
    run_dir: RunDirOption = None
    label: str = "model"
    """Name of the evaluation in the metrics."""
    compare: Annotated[tuple[Path, Path] | None, typer.Option(metavar="A B")] = None
    """Two folders of results whose problems are paired; nothing is evaluated."""
    json: Json = False
    dry_run: DryRun = False


@command(
    "eval", "Evaluate a model folder on all sets, or compare evaluations.",
    epilog=_EXAMPLES + KEYS_HELP,
)  # fmt: skip
def evaluation(options: EvalOptions, console: Console) -> int:
    """Exit code: 0, 1 (a role died), 2 (bad input)."""
    if options.compare:
        return _compare(options, console)
    if not options.config:
        raise InputError("megatron-rl eval needs --config FILE, or --compare A B")
    if options.json:
        raise InputError(
            "--json works only with --compare; the results of one model are in RUN/eval.json"
        )
    models = [word for word in options.overrides if "=" not in word]
    if len(models) > 1:
        raise InputError(f"{models} are several models: evaluate one after the other")
    overrides = [word for word in options.overrides if "=" in word]
    overrides += [override("model.path", model) for model in models]
    if options.run_dir is not None:
        overrides.append(override("run.dir", str(options.run_dir)))
    config = load_config([config_path(text) for text in options.config], overrides)
    if models:
        # The given model counts, not the start of training.
        model = config.model.model_copy(update={"megatron_path": None})
        config = config.model_copy(update={"model": model})
    # Loads most of the launcher, which a comparison does not need.
    from megatron_rl.evaluation.runs.runner import evaluate

    return until_death(
        lambda: evaluate(
            config, options.label, console, dry_in=config.run.dir if options.dry_run else None
        )
    )


def _compare(options: EvalOptions, console: Console) -> int:
    if options.config or options.overrides or options.dry_run or options.run_dir is not None:
        raise InputError("--compare A B takes two folders of results and nothing else but --json")
    first, second = options.compare
    compared = compare_folders(first, second)
    if options.json:
        say(console, json.dumps(compared, indent=2))
    else:
        print_comparison(compared, console)
    return 0
