"""Groups of commands whose modules are loaded when one is called, not to list them.

Used by `cli.py` and `data/command.py`. Help and completion of names need the table alone.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


@dataclass(frozen=True)
class Entry:
    """One command of a group."""

    name: str
    module: str
    """Dotted name of the module whose `app` has the command."""
    help: str
    panel: str = "Commands"
    """Heading in the help of the group."""
    is_group: bool = False
    """Whether the whole `app` is meant, with its commands."""


class LazyGroup(TyperGroup):
    """Lists stand-ins; `resolve_command`, which calling and completion use, gives the command."""

    entries: Sequence[Entry] = ()

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        for entry in self.entries:
            self.add_command(TyperCommand(entry.name, help=entry.help, rich_help_panel=entry.panel))

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """In the order of the table."""
        return [entry.name for entry in self.entries]

    def resolve_command(
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """The command that the first word names, loaded, and the other words."""
        name, found, rest = super().resolve_command(ctx, args)
        entry = next((entry for entry in self.entries if entry.name == name), None)
        return name, found if entry is None else load(entry), rest


def load(entry: Entry) -> TyperCommand | TyperGroup:
    """The command itself."""
    found = get_command(importlib.import_module(entry.module).app)
    if isinstance(found, TyperGroup) and not entry.is_group:
        return found.commands[entry.name]
    return found


def lazy_app(help_text: str, entries: Sequence[Entry], *, add_completion: bool) -> typer.Typer:
    """A typer app of these commands."""
    kind = type("Group", (LazyGroup,), {"entries": tuple(entries)})
    app = typer.Typer(cls=kind, help=help_text, no_args_is_help=True, add_completion=add_completion)
    # Without a callback typer takes an app with no command of its own for none at all.
    app.callback()(_group)
    return app


def _group() -> None:
    pass


def plain_app(help_text: str | None = None, *, callback: Callable[..., int] | None = None,
              ) -> typer.Typer:  # fmt: skip
    """A typer app for the commands of one module; callback: called where no command is named."""
    app = typer.Typer(
        help=help_text,
        add_completion=False,
        no_args_is_help=callback is None,
        invoke_without_command=callback is not None,
    )
    if callback is not None:
        app.callback()(callback)
    return app
