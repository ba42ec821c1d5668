"""Makes typer commands of functions `f(options, console)`, with a dataclass of options.

Used by every module of commands.

- A field `name: Annotated[type, typer.Option(...)] = default` becomes `--name`, a field with
  `typer.Argument(...)` a positional word.
- A flag gives its name, as in `typer.Option("--name")`; else typer adds `--no-name`.
- An option with the metavar "FILE..." takes all words up to the next option; with "[NAME...]" it
  may have none.
- A group imports a command's module when the command is called. Help and completion of names need
  only the table.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

PROGRAM = "megatron-rl"
Handler = Callable[[Any, Console], int]


class Command(TyperCommand):
    """Runs under `run_main`: exit code 0, 1, 2 (bad input) or 128 + signal."""

    handler: Handler

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse; options may take several words."""
        several = {
            o: str(p.metavar) for p in self.params for o in p.opts if "..." in (p.metavar or "")
        }
        optional = [option for option, metavar in several.items() if metavar.startswith("[")]
        return super().parse_args(ctx, spread(args, several, optional))

    def invoke(self, ctx: typer.Context) -> int:
        """Call the handler with the options."""
        # Loads sockets and the configuration, which help does not need.
        from megatron_rl.protocol.process import run_main

        options, codes = super().invoke(ctx), list[int]()
        code = run_main(PROGRAM, lambda: codes.append(self.handler(options, ctx.obj["console"])))
        return code or codes[0]


def spread(
    words: Sequence[str], several: Collection[str], optional: Collection[str] = ()
) -> list[str]:
    """`--against A B` as `--against A --against B`, for the options in `several`.

    optional: options that may have no word; they then get one empty text.
    """
    found: list[str] = []
    taking = ""
    for word in words:
        if word.startswith("-") and word != "-":
            found += _empty(found, optional)
            taking = word if word in several else ""
        elif taking and found[-1] != taking:
            found.append(taking)
        found.append(word)
    return found + _empty(found, optional)


def _empty(found: Sequence[str], optional: Collection[str]) -> list[str]:
    return [""] if found and found[-1] in optional else []


def command(
    app: typer.Typer, name: str, help_text: str, *, epilog: str | None = None
) -> Callable[[Handler], Handler]:
    """Add the decorated `f(options, console) -> exit code` to the app."""

    def add(handler: Handler) -> Handler:
        kind = next(iter(get_type_hints(handler).values()))
        bound = type("Command", (Command,), {"handler": staticmethod(handler)})
        app.command(name, cls=bound, help=help_text, epilog=epilog)(_maker_of(kind))
        return handler

    return add


def _maker_of(kind: type) -> Callable[..., Any]:
    """A function of a dataclass's fields that makes one, with a signature that typer reads."""

    def make(**given: Any) -> Any:
        # Typer gives None for a missing list.
        return kind(**{name: value for name, value in given.items() if value is not None})

    factories = {
        field.name: field.default_factory()
        for field in dataclasses.fields(kind)
        if field.default_factory is not dataclasses.MISSING
    }
    parameters = [
        one.replace(kind=one.KEYWORD_ONLY, default=factories.get(one.name, one.default))
        for one in inspect.signature(kind).parameters.values()
    ]
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    make.__annotations__ = get_type_hints(kind, include_extras=True)
    return make


@dataclasses.dataclass(frozen=True)
class Entry:
    """One command of a group."""

    name: str
    module: str
    """Dotted name of the module whose `app` has the command."""
    help: str
    panel: str = "Commands"
    """Heading in the help of the group."""
    is_group: bool = False
    """Whether the entry is the whole `app` with its commands."""


class LazyGroup(TyperGroup):
    """Lists placeholders; `resolve_command`, which calls and completion use, loads a command."""

    entries: Sequence[Entry] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for entry in self.entries:
            self.add_command(TyperCommand(entry.name, help=entry.help, rich_help_panel=entry.panel))

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """In the order of the table."""
        return [entry.name for entry in self.entries]

    def resolve_command(
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """The loaded command of the first word, and the other words."""
        name, found, rest = super().resolve_command(ctx, args)
        entry = next((entry for entry in self.entries if entry.name == name), None)
        return name, found if entry is None else load(entry), rest


def load(entry: Entry) -> TyperCommand | TyperGroup:
    """Import a command."""
    found = get_command(importlib.import_module(entry.module).app)
    if isinstance(found, TyperGroup) and not entry.is_group:
        return found.commands[entry.name]
    return found


def lazy_app(help_text: str, entries: Sequence[Entry], *, add_completion: bool) -> typer.Typer:
    """A typer app of these commands."""
    kind = type("Group", (LazyGroup,), {"entries": tuple(entries)})
    app = typer.Typer(cls=kind, help=help_text, no_args_is_help=True, add_completion=add_completion)
    # Typer refuses an app without commands unless it has a callback.
    app.callback()(lambda: None)
    return app


def plain_app(
    help_text: str | None = None, *, callback: Callable[..., int] | None = None
) -> typer.Typer:
    """A typer app for the commands of one module. callback: called without a command's name."""
    app = typer.Typer(
        help=help_text,
        add_completion=False,
        no_args_is_help=callback is None,
        invoke_without_command=callback is not None,
    )
    if callback is not None:
        app.callback()(callback)
    return app
