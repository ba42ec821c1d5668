"""`megatron-rl data translate`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import DryRun
from megatron_rl.cli.command_line.printing import progress, say
from megatron_rl.cli.data_tools.files import (
    ToolOptions,
    check_output,
    part_of,
    read_prompts,
    write_rows,
)
from megatron_rl.config.errors import InputError
from megatron_rl.curation.rows import encode_lines
from megatron_rl.curation.translate import (
    Chosen,
    TranslateOptions,
    choose,
    read_translations,
    translate,
)
from megatron_rl.protocol.whole_file import write_whole

if TYPE_CHECKING:
    from megatron_rl.curation.chat_endpoint import Endpoint

_HOW = "Who translates: one of these"
_SERVER = "With --endpoint"


@dataclass(frozen=True, kw_only=True)
class Options(TranslateOptions, ToolOptions):
    requests: Annotated[bool, typer.Option(rich_help_panel=_HOW)] = False
    """Write requests to --out, for any translator."""
    translations: Annotated[Path | None, typer.Option(rich_help_panel=_HOW)] = None
    """JSONL file of {id, language, text}."""
    endpoint: Annotated[str | None, typer.Option(rich_help_panel=_HOW)] = None
    """Address of the server, such as http://127.0.0.1:30000/v1."""
    served_model: Annotated[str | None, typer.Option(rich_help_panel=_SERVER)] = None
    """Name that the server gives the model."""
    key_variable: Annotated[str | None, typer.Option(rich_help_panel=_SERVER)] = None
    """Environment variable with the server's key."""
    attempts: Annotated[int, typer.Option(rich_help_panel=_SERVER)] = 3
    """Number of tries of a request."""
    at_once: Annotated[int, typer.Option(rich_help_panel=_SERVER)] = 16
    """Number of open requests."""
    timeout_s: Annotated[float, typer.Option(rich_help_panel=_SERVER)] = 120.0
    """Seconds of a try."""
    max_tokens: Annotated[int, typer.Option(rich_help_panel=_SERVER)] = 4096
    """Maximum tokens of a response, thoughts included."""
    dry_run: DryRun = False


@command("translate", "Put a share of the problems into six other languages.")
def translate_file(options: Options, console: Console) -> int:
    ways = (options.requests, options.translations is not None, options.endpoint is not None)
    if sum(ways) != 1:
        raise InputError("give one of --requests, --translations FILE, --endpoint URL")
    wanted = part_of(TranslateOptions, options)
    check_output(options)
    rows = read_prompts(options)
    chosen, ineligible = choose(rows, wanted)
    if options.dry_run:
        return _say_what_it_would_do(options, chosen, console)
    if options.requests:
        write_whole(options.out, encode_lines([item.request for item in chosen]))
        said = ", ".join(f"{count} {reason}" for reason, count in ineligible.most_common())
        count = f"{len(chosen)} of {len(rows)} problems to translate"
        say(console, f"{options.out}: {count}; not eligible: {said or 'none'}")
        return 0
    if options.translations is not None:
        found = read_translations(options.translations)
        figures = {"translations_of_no_request": _count_unused(found, chosen, console)}
    else:
        found, figures = _ask_endpoint(options, chosen, console)
    kept, report = translate(rows, lambda r: found.get((r.id, r.language), ""), wanted)
    report = msgspec.structs.replace(report, figures={**report.figures, **figures})
    return write_rows(options.out, kept, report, console)


def _say_what_it_would_do(options: Options, chosen: list[Chosen], console: Console) -> int:
    source = options.endpoint or options.translations or "nobody: requests are written"
    if options.endpoint is not None:
        _endpoint(options)
    would = f"would have {len(chosen)} problems translated by {source}, and write {options.out}"
    say(console, f"{would}. Dry run: nothing was asked or written.")
    return 0


def _count_unused(found: dict[tuple[str, str], str], chosen: list[Chosen], console: Console) -> int:
    """Number of translations that no chosen problem asks for; the user is told."""
    asked = {(item.request.id, item.language) for item in chosen}
    unused = [f"{one[0]!r} in {one[1]!r}" for one in found if one not in asked]
    if unused:
        say(
            console,
            f"warning: {len(unused)} of {len(found)} translations are not used (first "
            f"{unused[0]}), because no chosen problem asks for them: give the same file of "
            "problems, --share, --languages, --tasks and --seed as with --requests",
        )
    return len(unused)


def _ask_endpoint(
    options: Options, chosen: list[Chosen], console: Console
) -> tuple[dict[tuple[str, str], str], dict[str, Any]]:
    """(translations by a served model, figures); OUT.translations.jsonl keeps translations."""
    # Only this option needs aiohttp.
    from megatron_rl.curation.asking import ask_all

    endpoint = _endpoint(options)
    beside = options.out.with_name(f"{options.out.name}.translations.jsonl")
    with progress(console, "translations") as report_on:
        asked = ask_all(
            chosen,
            endpoint,
            beside,
            attempts=options.attempts,
            at_once=options.at_once,
            progress=report_on,
        )
    return asked.texts, {"requests": asked.figures()}


def _endpoint(options: Options) -> "Endpoint":
    """The server. Raises InputError."""
    from megatron_rl.curation.chat_endpoint import Endpoint

    if not options.served_model:
        raise InputError("--endpoint needs --served-model NAME: the name that the server gives it")
    key = ""
    if options.key_variable is not None:
        key = os.environ.get(options.key_variable, "")
        if not key:
            raise InputError(f"--key-variable {options.key_variable}: it is not set, or empty")
    assert options.endpoint is not None
    return Endpoint(
        options.endpoint, options.served_model, options.timeout_s, options.max_tokens, key
    )
