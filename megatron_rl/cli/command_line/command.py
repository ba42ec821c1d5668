"""Makes typer commands of functions `f(options, console)`, with a dataclass of options.

Used by every module of commands.

- A field `name: type = default` becomes the option `--name`, with its docstring as help. Types are
  those of typer; `Annotated[type, typer.Option(...)]` adds a metavar, a completion or a panel, and
  `typer.Argument(...)` makes a positional word.
- A bool is a flag without `--no-name`; `typer.Option(...)` of a bool must name it.
- A list takes all words up to the next option, as does any option with a metavar like "FILE...";
  with "[NAME...]" it may have none.
- A group imports a command's module when the command is called. Help and completion of names need
  only the table.
"""

import ast
import copy
import dataclasses
import importlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import ParameterInfo

PROGRAM = "megatron-rl"
Handler = Callable[[Any, Console], int]
_APPS: dict[str, typer.Typer] = {}
"""The commands of each imported module."""


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
        # Loads sockets and the configuration, which help does not need.
        from megatron_rl.protocol.process import run_main

        make, codes = super().invoke, list[int]()
        code = run_main(PROGRAM, lambda: codes.append(self.handler(make(ctx), ctx.obj["console"])))
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
    name: str, help_text: str, *, epilog: str | None = None
) -> Callable[[Handler], Handler]:
    """Make a command of the decorated `f(options, console) -> exit code`.

    Its docstring tells the exit codes, unless they are 0 and 2 (bad input).
    """

    def add(handler: Handler) -> Handler:
        kind = next(iter(get_type_hints(handler).values()))
        bound = type("Command", (Command,), {"handler": staticmethod(handler)})
        app = _APPS.setdefault(handler.__module__, _new_app(no_args_is_help=True))
        app.command(name, cls=bound, help=help_text, epilog=epilog)(_maker_of(kind))
        return handler

    return add


def _maker_of(kind: type) -> Callable[..., Any]:
    """A function of a dataclass's fields that makes one, with a signature that typer reads."""

    def make(**given: Any) -> Any:
        given |= {name: [] for name in optional if given[name] == [""]}
        # Typer gives None for a missing list.
        return kind(**{name: value for name, value in given.items() if value is not None})

    factories = {
        field.name: field.default_factory()
        for field in dataclasses.fields(kind)
        if field.default_factory is not dataclasses.MISSING
    }
    texts, hints = _docstrings(kind), get_type_hints(kind, include_extras=True)
    parameters = [
        one.replace(
            kind=one.KEYWORD_ONLY,
            default=factories.get(name, one.default),
            annotation=_with_help(name, hints[name], texts.get(name)),
        )
        for name, one in inspect.signature(kind).parameters.items()
    ]
    metavars = {one.name: one.annotation.__metadata__[0].metavar or "" for one in parameters}
    optional = [name for name, metavar in metavars.items() if metavar.startswith("[")]
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return make


def _docstrings(kind: type) -> dict[str, str]:
    """The docstring of each field of a dataclass and its bases."""
    found = {}
    for one in reversed(kind.__mro__[:-1]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        for field, text in itertools.pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def _with_help(name: str, hint: Any, text: str | None) -> Any:
    """The type of a field as an option of typer, with its help."""
    kind, given = getattr(hint, "__origin__", hint), getattr(hint, "__metadata__", ())
    info = next((copy.copy(one) for one in given if isinstance(one, ParameterInfo)), None)
    if info is None:
        kind, info = hint, typer.Option(metavar="NAME..." if kind is list else None)
    if kind is bool and not info.param_decls and info.default is ...:
        info.param_decls = (f"--{name.replace('_', '-')}",)
    info.help = text or info.help
    return Annotated[kind, info]


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Of a command that takes none."""


@dataclasses.dataclass(frozen=True)
class Entry:
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

    def resolve_command(
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """The loaded command of the first word, and the other words."""
        name, found, rest = super().resolve_command(ctx, args)
        entry = next((entry for entry in self.entries if entry.name == name), None)
        return name, found if entry is None else load(entry), rest


def load(entry: Entry) -> TyperCommand | TyperGroup:
    module = importlib.import_module(entry.module)
    found = get_command(_APPS.get(entry.module) or module.app)
    if isinstance(found, TyperGroup) and not entry.is_group:
        return found.commands[entry.name]
    return found


def lazy_app(help_text: str, entries: Sequence[Entry], *, add_completion: bool) -> typer.Typer:
    kind = type("Group", (LazyGroup,), {"entries": tuple(entries)})
    app = typer.Typer(cls=kind, help=help_text, no_args_is_help=True, add_completion=add_completion)
    # Typer refuses an app without commands unless it has a callback.
    app.callback()(lambda: None)
    return app


def group(module: str, help_text: str, *, callback: Callable[..., int] | None = None) -> None:
    """Make a group of a module's commands. callback: called without a command's name."""
    app = _new_app(
        help=help_text,
        no_args_is_help=callback is None,
        invoke_without_command=callback is not None,
    )
    if callback is not None:
        app.callback()(callback)
    _APPS[module] = app


def _new_app(**settings: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, **settings)
