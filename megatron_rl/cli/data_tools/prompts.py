"""`megatron-rl data check` and `data show`: faults of prompts; prompts as the model sees them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.completion import complete_config
from megatron_rl.cli.command_line.groups import plain_app
from megatron_rl.cli.command_line.parameters import Json, Overrides
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override, read_layers, resolve
from megatron_rl.config.shipped import config_path, shipped
from megatron_rl.config.tree import Config
from megatron_rl.data.check import UNKNOWN_TASK, Fault, Findings, check_prompts
from megatron_rl.data.prompts import PromptSets, prompts_of_run
from megatron_rl.launcher.hub_models import folder_of
from megatron_rl.observe.terminal_text import printable
from megatron_rl.protocol.render import RenderError, open_renderer
from megatron_rl.protocol.tokenizer_child import call_in_child
from megatron_rl.protocol.types import Prompt

_NAMED_KINDS = ("hub", "reasoning_gym")
_RENDER_S = 120.0
_FAULT_CHARS = 400
_FIRST_PLACES = 3


class Shown(NamedTuple):
    """A prompt as the model sees it."""

    text: str
    tokens: int
    refusal: str
    """Why a run would leave it out; empty: it would not."""


app = plain_app()
Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="configuration (TOML file or shipped name), file or folder of prompts, hub:NAME, "
        "reasoning_gym:NAME",
        show_default=False,
    ),
]
Configs = Annotated[
    list[str],
    typer.Option(
        "--config", metavar="FILE", show_default=False, autocompletion=complete_config,
        help="configuration whose tasks, model and lengths hold for SOURCE; alone: its own prompts",
    ),
]  # fmt: skip
Model = Annotated[
    Path | None, typer.Option(help="model folder, for its tokenizer and chat template")
]


@dataclass(frozen=True)
class CheckOptions:
    """What `data check` is given."""

    source: Source = None
    overrides: Overrides = field(default_factory=list)
    config: Configs = field(default_factory=list)
    model: Model = None
    limit: Annotated[int, typer.Option(help="different faults to print")] = 20
    json: Json = False


@command(app, "check", "Faults of prompts, with their rows.")
def check_source(options: CheckOptions, console: Console) -> int:
    """Exit code: 0, 1 (there are faults), 2 (bad input)."""
    return check(
        options.source,
        options.overrides,
        console,
        configs=options.config,
        model=options.model,
        limit=options.limit,
        as_json=options.json,
    )


@dataclass(frozen=True)
class ShowOptions:
    """What `data show` is given."""

    source: Source = None
    overrides: Overrides = field(default_factory=list)
    config: Configs = field(default_factory=list)
    model: Model = None
    rows: Annotated[int, typer.Option(help="prompts to print")] = 3
    start: Annotated[int, typer.Option(help="number of prompts to skip first")] = 0
    split: Annotated[str, typer.Option(help="train, held_out or a set's name")] = "train"
    chars: Annotated[int, typer.Option(help="of each prompt")] = 4000


@command(app, "show", "Prompts as the model sees them.")
def show_source(options: ShowOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    return show(
        options.source,
        options.overrides,
        console,
        configs=options.config,
        model=options.model,
        rows=options.rows,
        start=options.start,
        split=options.split,
        chars=options.chars,
    )


def check(
    source: str | None,
    overrides: Sequence[str],
    console: Console,
    *,
    configs: Sequence[str] = (),
    model: Path | None = None,
    limit: int = 20,
    as_json: bool = False,
) -> int:
    """Print the faults of prompts; exit code 1 where there are any. Raises InputError.

    limit: different faults that are printed; all are counted.
    """
    config = read_source_config(source, overrides, model, configs)
    findings = check_prompts(config, with_lengths=_has_model(config, model))
    if as_json:
        print(json.dumps(_as_json(findings)), file=console.file)
        return int(bool(findings.faults))
    for note in findings.notes:
        _say(console, note)
    lines = fault_lines(findings.faults)
    for line in lines[: max(0, limit)]:
        _say(console, line)
    hidden = len(lines) - max(0, limit)
    if hidden > 0:
        _say(console, f"... and {hidden} more: --limit {len(lines)} prints all")
    _print_counts(findings, console)
    if not configs and any(fault.reason == UNKNOWN_TASK for fault in findings.faults):
        _say(console, "tasks of your own: --config FILE that has their [reward.tasks.NAME]")
    return int(bool(findings.faults))


def fault_lines(faults: Sequence[Fault]) -> list[str]:
    """A line for each different fault; equal ones of several rows are one line with their count."""
    places: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        text = fault.text.removeprefix(fault.place).removeprefix(": ")
        places.setdefault((fault.reason, text), []).append(fault.place)
    lines = []
    for (reason, text), found in places.items():
        if len(found) == 1:
            lines.append(f"{reason}: {found[0]}: {text}"[:_FAULT_CHARS])
            continue
        more = ", ..." if len(found) > _FIRST_PLACES else ""
        first = f"{', '.join(found[:_FIRST_PLACES])}{more}"
        lines.append(f"{reason}: {len(found):,} rows ({first}): {text[:_FAULT_CHARS]}")
    return lines


def show(
    source: str | None,
    overrides: Sequence[str],
    console: Console,
    *,
    configs: Sequence[str] = (),
    model: Path | None = None,
    rows: int = 3,
    start: int = 0,
    split: str = "train",
    chars: int = 4000,
) -> int:
    """Print prompts as the model sees them, with their tokens; exit code 0. Raises InputError.

    split: train, held_out, or the name of an evaluation set. chars: of each, from its start.
    """
    for name, value in (("--rows", rows), ("--chars", chars)):
        if value < 1:
            raise InputError(f"{name} {value}: expected 1 or more")
    config = read_source_config(source, overrides, model, configs)
    sets = prompts_of_run(config)
    known = _of_split(sets, split)
    chosen = known[max(0, start) : max(0, start) + rows]
    if not chosen:
        raise InputError(f"--start {start}: the split {split} has {len(known)} prompts")
    for note in [sets.describe(), *sets.notes]:
        _say(console, note)
    shown: list[Shown] | None = None
    if _has_model(config, model):
        shown = call_in_child(
            render_shown, config, chosen, what="rendering the prompts", limit_s=_RENDER_S
        )
    else:
        _say(console, "as written: give --model DIR for the chat template and token counts")
    for number, prompt in enumerate(chosen):
        _print_prompt(prompt, shown[number] if shown else None, chars, console)
    return 0


def read_source_config(
    source: str | None, overrides: Sequence[str], model: Path | None, configs: Sequence[str] = ()
) -> Config:
    """The configuration that names, or stands for, a source of prompts. Raises InputError.

    configs: what holds for the source beside its prompts; without a source, their own prompts.
    """
    given = []
    if model is not None:
        given.append(override("model.path", str(folder_of(model, key="--model"))))
    if source is not None and "=" in source and not Path(source).exists():
        source, overrides = None, [source, *overrides]
    given += overrides
    files = [config_path(name) for name in configs]
    if source is None and not files:
        raise InputError("nothing to look at: give a file of prompts, or --config FILE")
    kind, _, name = (source or "").partition(":")
    if source is None:
        config = load_config(files, given)
    elif kind in _NAMED_KINDS and name:
        config = _of_one_source({"kind": kind, "name": name}, files, given)
    elif _is_configuration(source):
        config = load_config([*files, config_path(source)], given)
    else:
        config = _of_one_source({"path": source}, files, given)
    if not config.prompts and not config.eval.sets:
        raise InputError(
            f"{source or ', '.join(configs)} names no prompts: add a [[prompts]] section"
        )
    return config


def _is_configuration(source: str) -> bool:
    path = Path(source)
    return path.suffix == ".toml" or (source in shipped() and not path.exists())


def _of_one_source(
    source: dict[str, str], files: Sequence[Path], overrides: Sequence[str]
) -> Config:
    """The configuration with one source of prompts, which overrides may change."""
    layers = read_layers(files)
    layers.tree["prompts"] = [source]
    layers.tree.get("eval", {}).pop("sets", None)
    layers.add_overrides(overrides)
    return resolve(layers)


def render_shown(config: Config, prompts: list[Prompt]) -> list[Shown]:
    """In a child: prompts as the model sees them; imports transformers."""
    renderer = open_renderer(config)
    found = []
    for prompt in prompts:
        try:
            ids = renderer.render(
                prompt.messages, 0, task=prompt.task, is_program=prompt.is_program
            )
            text, tokens, refusal = renderer.decode(ids), len(ids), ""
            room = renderer.context_tokens - config.sampling.max_new_tokens
            if tokens > room:
                refusal = f"{tokens} tokens, {room} leave room for sampling.max_new_tokens"
        except RenderError as error:
            text, tokens, refusal = "", 0, str(error)
        found.append(Shown(text, tokens, refusal))
    return found


def _has_model(config: Config, model: Path | None) -> bool:
    """Whether there is a folder for the tokenizer; one that was asked for must be there."""
    if model is not None and not config.model.path.is_dir():
        raise InputError(f"--model {model}: there is no such folder")
    return config.model.path.is_dir()


def _of_split(sets: PromptSets, split: str) -> list[Prompt]:
    if split == "train":
        return [prompt for prompts in sets.train for prompt in prompts]
    if split == "held_out":
        return sets.held_out
    if split in sets.eval_sets:
        return sets.eval_sets[split]
    raise InputError(
        f"--split {split}: expected one of {', '.join(['train', 'held_out', *sets.eval_sets])}"
    )


def _print_prompt(prompt: Prompt, shown: Shown | None, chars: int, console: Console) -> None:
    said = f"--- {prompt.id} ({prompt.place or 'made'}), task {prompt.task}, {prompt.split}"
    if shown is not None:
        said += f", {shown.tokens} tokens"
    _say(console, said)
    if shown is not None and shown.refusal:
        _say(console, f"a run leaves it out: {shown.refusal}")
    text = shown.text if shown is not None and shown.text else _as_written(prompt)
    _say_lines(console, text, chars)
    _say(console, f"answer: {prompt.answer[:chars]}")
    if prompt.entry:
        _say(console, f"entry: {prompt.entry[:chars]}")


def _as_written(prompt: Prompt) -> str:
    return "\n".join(f"[{message.role}] {message.content}" for message in prompt.messages)


def _print_counts(findings: Findings, console: Console) -> None:
    prompts = sum(len(part.prompts) for part in findings.parts)
    table = Table("data check", "rows")
    table.add_row("prompts", str(prompts))
    for reason, count in Counter(fault.reason for fault in findings.faults).most_common():
        table.add_row(f"fault: {reason}", str(count))
    console.print(table, markup=False)
    if not findings.faults:
        _say(console, "no faults")


def _as_json(findings: Findings) -> dict[str, object]:
    def described(fault: Fault) -> dict[str, str]:
        return fault._asdict()

    return {
        "prompts": sum(len(part.prompts) for part in findings.parts),
        "counts": dict(Counter(fault.reason for fault in findings.faults).most_common()),
        "faults": [described(fault) for fault in findings.faults],
        "notes": findings.notes,
    }


def _say_lines(console: Console, text: str, chars: int) -> None:
    """Text of a data set line by line: its characters move no cursor."""
    for line in text[:chars].split("\n"):
        _say(console, line)
    if len(text) > chars:
        _say(console, f"... {len(text) - chars} more characters: --chars {len(text)}")


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
