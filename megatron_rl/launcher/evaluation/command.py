"""`megatron-rl eval [MODEL] --config FILE` and `megatron-rl eval --compare A B`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.launcher.config_command import add_config_argument, config_files
from megatron_rl.launcher.evaluation.comparing import compare_folders
from megatron_rl.launcher.evaluation.runner import evaluate
from megatron_rl.launcher.evaluation.tables import print_comparison


def add_arguments(
    parser: argparse.ArgumentParser, until_death: Callable[[Callable[[], None]], int]
) -> None:
    """Arguments of the command; until_death: exit code of work whose processes may die."""
    parser.add_argument("overrides", nargs="*", metavar="MODEL | section.key=value",
                        help="a Hugging Face folder; default: model.path")  # fmt: skip
    add_config_argument(parser, is_required=False)
    parser.add_argument("--run-dir", type=Path, help="folder of the results; as run.dir=DIR")
    parser.add_argument("--label", default="model", help="name of the evaluation in the metrics")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"),
        help="evaluate nothing: pair the problems of two folders of results",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --compare: print JSON")
    parser.set_defaults(handler=lambda options, console: _run(options, console, until_death))


def _run(
    options: argparse.Namespace, console: Console, until_death: Callable[[Callable[[], None]], int]
) -> int:
    if options.compare:
        return _compare(options, console)
    if options.config is None:
        raise InputError("megatron-rl eval needs --config FILE, or --compare A B")
    if options.json:
        raise InputError("--json goes with --compare; figures of an evaluation are in eval.json")
    models = [word for word in options.overrides if "=" not in word]
    if len(models) > 1:
        raise InputError(f"{models} are several models: evaluate one after the other")
    overrides = [word for word in options.overrides if "=" in word]
    overrides += [override("model.path", model) for model in models]
    if options.run_dir is not None:
        overrides.append(override("run.dir", str(options.run_dir)))
    config = load_config(config_files(options), overrides)
    if models:
        # What is asked for is this folder, whatever training began with.
        model = config.model.model_copy(update={"megatron_path": None})
        config = config.model_copy(update={"model": model})
    return until_death(lambda: evaluate(config, options.label, console))


def _compare(options: argparse.Namespace, console: Console) -> int:
    if options.config is not None or options.overrides or options.run_dir is not None:
        raise InputError("--compare A B takes two folders of results and nothing else but --json")
    first, second = options.compare
    compared = compare_folders(first, second)
    if options.json:
        console.print(json.dumps(compared, indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        print_comparison(compared, console)
    return 0
