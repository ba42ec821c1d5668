"""What a command is given for a command line, without calling it."""

from typing import Any

from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from megatron_rl.cli import main as cli
from megatron_rl.cli.command_line.command import lazy_app


def parse(words: list[str]) -> Any:
    """The options of the command that these words name."""
    group = get_command(lazy_app("", cli.COMMANDS, add_completion=False))
    ctx = group.make_context("megatron-rl", list(words), obj={"console": Console()})
    while isinstance(ctx.command, TyperGroup):
        name, command, rest = ctx.command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        ctx = command.make_context(name, rest, parent=ctx)
    return ctx.command.callback(**ctx.params)
