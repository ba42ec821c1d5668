"""The command line `megatron-rl COMMAND`; a table names each command's module.

Imports only light libraries and `command_line/`, so that help and completion are quick.
`run_main`, called in `command_line/command.py`, turns errors into exit codes.
"""

import io
import logging
import sys

import typer
from typer.main import get_command

from megatron_rl.cli.command_line.command import PROGRAM, Entry, lazy_app
from megatron_rl.cli.command_line.printing import open_console

_RUNS, _DATA, _LOOK, _PLAN = "Run", "Models and data", "Look at runs", "Plan and check"
COMMANDS = tuple(
    Entry(name, f"megatron_rl.cli.{module}", help_text, panel, is_group)
    for name, module, help_text, panel, is_group in (
        ("init", "init", "Write a configuration: five questions.", _RUNS, False),
        ("run", "run", "Train, evaluate, export, summarize.", _RUNS, False),
        ("sft", "sft", "Run the cold start alone, to a model folder.", _RUNS, False),
        ("eval", "eval", "Evaluate a model, or compare evaluations.", _RUNS, False),
        ("sweep", "sweep", "Run variants over seeds, and compare them.", _RUNS, False),
        ("prepare", "node", "Prepare a run on several nodes: once, first.", _RUNS, False),
        ("node", "node", "Start one node of a prepared run.", _RUNS, False),
        ("join", "node", "Add generators to a running run.", _RUNS, False),
        ("status", "status", "Show the state of a run, from any shell.", _LOOK, False),
        ("report", "report", "Summarize runs as text and HTML.", _LOOK, False),
        ("view", "view", "Show the rollouts of a run in a browser.", _LOOK, False),
        ("verify", "verify", "Grade completions of a file, with reasons.", _LOOK, False),
        ("replay", "replay", "Repeat recorded steps, and compare.", _LOOK, False),
        ("audit", "audit", "Check a run's records for consistency.", _LOOK, False),
        ("analyse", "analyse", "Analyze weights, and reward against length.", _LOOK, True),
        ("metrics", "metrics", "Print what metrics mean; export them.", _LOOK, True),
        ("config", "config", "Explain, show, compare and migrate keys.", _PLAN, True),
        ("plan", "plan", "Estimate what a run needs, and if it fits.", _PLAN, False),
        ("plan-weights", "plan", "Show what a weight sync moves between ranks.", _PLAN, False),
        ("rehearse", "rehearse", "Take a step of every distinct rank, without GPUs.", _PLAN,
         False),
        ("simulate", "simulate", "Predict step time, idle shares, staleness.", _PLAN,
         False),
        ("algorithms", "algorithms", "List the presets of the objective.", _PLAN, False),
        ("doctor", "doctor", "Check what this machine has and lacks.", _PLAN, False),
        ("data", "data_tools", "Make prompts and SFT examples.", _DATA, True),
        ("convert", "convert", "Convert a model folder.", _DATA, False),
    )
)  # fmt: skip
_HELP = "Asynchronous RL on Megatron-Core and SGLang. `megatron-rl COMMAND --help` tells more."


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 (a process of the run failed), 2 (bad input), 128 + signal."""
    # Models write characters that the terminal's encoding may lack.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format=f"{PROGRAM}: %(message)s", stream=sys.stderr)
    # INFO of our packages goes to the run's launch.log only.
    logging.getLogger().handlers[0].setLevel(logging.WARNING)
    commands = get_command(lazy_app(_HELP, COMMANDS, add_completion=True))
    try:
        return commands.main(
            arguments, prog_name=PROGRAM, standalone_mode=False, obj={"console": open_console()}
        )
    except typer.TyperException as error:
        _say_what_is_wrong(error)
        return error.exit_code


def _say_what_is_wrong(error: typer.TyperException) -> None:
    context = getattr(error, "ctx", None)
    lines = [] if context is None else [context.get_usage()]
    # Empty after the help of a group.
    if text := error.format_message():
        lines += [f"{context.command_path if context else PROGRAM}: error: {text}"]
        typer.echo("\n".join(lines), err=True)


if __name__ == "__main__":
    sys.exit(main())
