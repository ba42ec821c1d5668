"""A command: a function of its options, which a dataclass describes, and of the console.

Used by every module that has commands. A field `name: Annotated[type, option(...)] = default`
becomes `--name`, one with `argument(...)` a positional word.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand
from typer.models import OptionInfo

PROGRAM = "megatron-rl"
Handler = Callable[[Any, Console], int]


@dataclasses.dataclass(frozen=True)
class Several:
    """Marks an option that takes all words up to the next option: `--against A B`."""

    or_none: bool = False
    """Whether no word at all is meant too: it is then the list of one empty text."""


class Command(TyperCommand):
    """Runs under `run_main`: exit code 0, 1, 2 (bad input) or 128 + signal."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """As typer does, but for options that take several words."""
        return super().parse_args(ctx, spread(args, getattr(self.callback, "several", {})))

    def invoke(self, ctx: typer.Context) -> int:
        """Call the handler."""
        # Sockets, and with them the configuration, are needed by those who call it only.
        from megatron_rl.protocol.process import run_main

        codes: list[int] = []
        call = super().invoke
        code = run_main(PROGRAM, lambda: codes.append(call(ctx)))
        return code or codes[0]


def spread(words: Sequence[str], several: Mapping[str, Several]) -> list[str]:
    """`--against A B` as `--against A --against B`."""
    found: list[str] = []
    waiting = ""
    taking = ""
    for word in words:
        if word.startswith("-") and word != "-":
            found += _alone(waiting, several)
            taking = waiting = word if word in several else ""
            found += [] if waiting else [word]
        elif taking:
            found += [taking, word]
            waiting = ""
        else:
            found.append(word)
    return found + _alone(waiting, several)


def _alone(option: str, several: Mapping[str, Several]) -> list[str]:
    """An option that no word followed: typer says what it needs, unless it needs none."""
    if not option:
        return []
    return [option, ""] if several[option].or_none else [option]


def command(
    app: typer.Typer, name: str, help_text: str, *, epilog: str | None = None
) -> Callable[[Handler], Handler]:
    """Add the decorated `f(options, console) -> exit code` to the app.

    The type of `options` is a dataclass, whose fields are options and arguments of the command.
    """

    def add(handler: Handler) -> Handler:
        kind = next(iter(get_type_hints(handler).values()))
        app.command(name, cls=Command, help=help_text, epilog=epilog)(_flat(handler, kind))
        return handler

    return add


def _flat(handler: Handler, kind: type) -> Callable[..., int]:
    """The function that typer sees: it takes what the dataclass has fields for."""

    def call(ctx: typer.Context, **given: Any) -> int:
        return handler(options(**given), ctx.obj["console"])

    def options(**given: Any) -> Any:
        # Typer gives None for a list that nobody has given.
        return kind(**{name: value for name, value in given.items() if value is not None})

    hints = get_type_hints(kind, include_extras=True)
    parameters = [_parameter(field, hints[field.name]) for field in dataclasses.fields(kind)]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    call.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in (context, *parameters)}
    call.__name__ = handler.__name__
    call.options = options  # type: ignore[attr-defined]
    call.several = {  # type: ignore[attr-defined]
        _flag(name): note
        for name, hint in hints.items()
        for note in get_args(hint)
        if isinstance(note, Several)
    }
    return call


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_named(field, hint)
    )


def _named(field: dataclasses.Field[Any], hint: Any) -> Any:
    """The annotation, with a flag that has no `--no-...` beside it where it is a bool."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *notes = get_args(hint)
    info = next(note for note in notes if not isinstance(note, Several))
    if isinstance(info, OptionInfo) and info.default is ... and kind is bool:
        info.default = _flag(field.name)
    return Annotated[kind, info]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
