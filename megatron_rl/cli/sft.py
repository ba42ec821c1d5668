"""`megatron-rl sft`: only the cold start of a configuration; its model is a HF folder."""

from typing import TYPE_CHECKING

from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.printing import say
from megatron_rl.cli.run import KEYS_HELP, StartOptions, load

if TYPE_CHECKING:
    from megatron_rl.config.tree import Config

_EXAMPLES = """Example:

megatron-rl sft --config my.toml --run-dir runs/cold sft.dataset=sft.jsonl sft.steps=200

megatron-rl run --config my.toml model.path=runs/cold/hf/cold_start sft.steps=0

megatron-rl convert runs/cold/checkpoints/sft/step_000150 model-150

"""


@command(
    "sft", "The cold start alone; its model is RUN_DIR/hf/cold_start.",
    epilog=_EXAMPLES + KEYS_HELP,
)  # fmt: skip
def sft(options: StartOptions, console: Console) -> int:
    """Exit code: 0, 1 (the run failed), 2 (bad input, nothing was started)."""
    from megatron_rl.launcher import preflight
    from megatron_rl.launcher import run as launch
    from megatron_rl.launcher.cold_start import cold_start_folder
    from megatron_rl.launcher.dry_run_text import NOTHING, run_lines
    from megatron_rl.launcher.last_words import last_words
    from megatron_rl.launcher.prompt_record import pin_revisions
    from megatron_rl.observe.deaths import until_death

    config = cold_start_alone(
        load(options.config, options.overrides, options.run_dir, is_dry=options.dry_run)
    )
    if options.dry_run:
        config = pin_revisions(config)
        found = preflight.check(config)
        say(console, *found.notes, *run_lines(config), NOTHING)
        return 0
    code = until_death(lambda: launch.run(config, console), lambda: last_words(config))
    if code == 0:
        say(console, f"Model: {cold_start_folder(config)}")
    return code


def cold_start_alone(config: "Config") -> "Config":
    """The configuration without the phases after the cold start. Raises InputError without one.

    Evaluations stay if they choose its model (sft.export_every_steps).
    """
    from megatron_rl.config.errors import InputError
    from megatron_rl.config.tree import Config

    if not config.sft.steps:
        raise InputError(
            "sft.steps is 0: there is no cold start; give sft.steps and sft.dataset=FILE"
        )
    tree = config.model_dump()
    tree["train"] |= {"steps": 0, "epochs": 0}
    tree["sft"]["baseline"] = False
    tree["stages"] = []
    if not config.sft.candidates:
        tree["eval"] |= {"prompts": 0, "sets": []}
    return Config.model_validate(tree)
