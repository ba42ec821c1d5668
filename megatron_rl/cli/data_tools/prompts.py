"""`megatron-rl data check` finds faults of prompts; `data show` prints what the model sees."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import ConfigFiles, Json, Overrides
from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import InputError, printable
from megatron_rl.config.files import load_config, override, read_layers, resolve
from megatron_rl.config.shipped import config_path, names_shipped
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config
from megatron_rl.data.check import UNKNOWN_TASK, Fault, Findings, check_prompts
from megatron_rl.data.own_systems import describe_own_systems
from megatron_rl.data.prompts import PromptSets, prompts_of_run
from megatron_rl.launcher.hub_models import folder_of
from megatron_rl.launcher.thinking import decide_thinking
from megatron_rl.protocol.render import Conversation, RenderError, open_renderer
from megatron_rl.protocol.render_probe import probe_renderer
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
    """Reason why a run would leave the prompt out; empty: none."""


@dataclass(frozen=True)
class SourceOptions:
    """Options of both commands."""

    source: Annotated[str | None, typer.Argument(metavar="SOURCE", show_default=False)] = None
    """Configuration (TOML file or shipped name), file or folder of prompts, hub:NAME,
    reasoning_gym:NAME."""
    overrides: Overrides = field(default_factory=list)
    config: ConfigFiles = field(default_factory=list)
    """Configuration with the tasks, model and lengths for SOURCE; without SOURCE: the configuration
    whose prompts are meant."""
    model: Path | None = None
    """Model folder, for its tokenizer and chat template."""


@dataclass(frozen=True)
class CheckOptions(SourceOptions):
    limit: int = 20
    """Maximum number of faults to print; equal faults count once."""
    json: Json = False


@command("check", "Find faults of prompts, with their rows.")
def check(options: CheckOptions, console: Console) -> int:
    """Exit code: 0, 1 (there are faults), 2 (bad input)."""
    config = decide_thinking(read_source_config(options))
    findings = check_prompts(config, with_lengths=_has_model(config, options.model))
    if options.json:
        print(json.dumps(_as_json(findings)), file=console.file)
        return int(bool(findings.faults))
    lines, limit = fault_lines(findings.faults), max(0, options.limit)
    _say(console, *findings.notes, *lines[:limit])
    if len(lines) > limit:
        _say(console, f"... and {len(lines) - limit} more: --limit {len(lines)} prints all")
    _print_counts(findings, console)
    if not options.config and any(fault.reason == UNKNOWN_TASK for fault in findings.faults):
        _say(console, "for your own tasks give --config FILE that has their [reward.tasks.NAME]")
    return int(bool(findings.faults))


def fault_lines(faults: Sequence[Fault]) -> list[str]:
    """A line for each different fault, with the count of its rows."""
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


@dataclass(frozen=True)
class ShowOptions(SourceOptions):
    rows: int = 3
    """Number of prompts to print."""
    start: int = 0
    """Number of prompts to skip first."""
    split: str = "train"
    """Split to print: train, held_out or the name of an evaluation set."""
    chars: int = 4000
    """Maximum number of characters per prompt."""


@command("show", "Show prompts as the model sees them, with their tokens.")
def show(options: ShowOptions, console: Console) -> int:
    for name in ("rows", "chars"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)}: expected 1 or more")
    config = decide_thinking(read_source_config(options))
    sets = prompts_of_run(config)
    known, start = _of_split(sets, options.split), max(0, options.start)
    chosen = known[start : start + options.rows]
    if not chosen:
        raise InputError(_nothing_text(sets, options, len(known)))
    own = describe_own_systems(sets.all, config)
    _say(console, sets.describe(), *sets.notes, *filter(None, [own]))
    shown: list[Shown] | None = None
    if _has_model(config, options.model):
        shown, findings = call_in_child(
            render_shown, config, chosen, what="rendering the prompts", limit_s=_RENDER_S
        )
        _say(console, *findings)
    else:
        _say(console, "as written: give --model DIR for the chat template and token counts")
    for number, prompt in enumerate(chosen):
        _print_prompt(prompt, shown[number] if shown else None, options.chars, console)
    return 0


def read_source_config(options: SourceOptions) -> Config:
    """The given configuration, or one with the given source of prompts. Raises InputError."""
    source, overrides, given = options.source, list(options.overrides), []
    if options.model is not None:
        given.append(override("model.path", str(folder_of(options.model, key="--model"))))
    if source is not None and "=" in source and not Path(source).exists():
        source, overrides = None, [source, *overrides]
    given += overrides
    files = [config_path(name) for name in options.config]
    if source is None and not files:
        raise InputError("nothing to look at: give a file of prompts, or --config FILE")
    kind, _, name = (source or "").partition(":")
    if source is None:
        config = load_config(files, given)
    elif kind in _NAMED_KINDS and name:
        config = _of_one_source({"kind": kind, "name": name}, files, given)
    elif Path(source).suffix == ".toml" or names_shipped(source):
        config = load_config([*files, config_path(source)], given)
    else:
        config = _of_one_source({"path": source}, files, given)
    if not config.prompts and not config.eval.sets:
        raise InputError(
            f"{source or ', '.join(options.config)} names no prompts: add a [[prompts]] section"
        )
    return config


def _of_one_source(
    source: dict[str, str], files: Sequence[Path], overrides: Sequence[str]
) -> Config:
    """A configuration with one source of prompts, which overrides may change."""
    layers = read_layers(files)
    layers.tree["prompts"] = [source]
    layers.tree.get("eval", {}).pop("sets", None)
    layers.add_overrides(overrides)
    return resolve(layers)


def render_shown(config: Config, prompts: list[Prompt]) -> tuple[list[Shown], list[str]]:
    """Prompts as the model sees them, and findings about the chat template.

    Runs in a child; imports transformers.
    """
    renderer = open_renderer(config)
    found = []
    for prompt in prompts:
        try:
            ids = renderer.render(
                prompt.messages, 0, task=prompt.task, is_program=prompt.is_program
            )
            text, tokens, refusal = renderer.decode(ids), len(ids), ""
            room = renderer.context_tokens - longest_stage(config).sampling.max_new_tokens
            if tokens > room:
                refusal = f"{tokens} tokens, {room} leave room for sampling.max_new_tokens"
        except RenderError as error:
            text, tokens, refusal = "", 0, str(error)
        found.append(Shown(text, tokens, refusal))
    shown = [Conversation(p.task, p.messages, p.is_program) for p in prompts]
    return found, probe_renderer(renderer, shown)


def _has_model(config: Config, model: Path | None) -> bool:
    """Whether a model folder exists. Raises InputError if a given one does not."""
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


def _nothing_text(sets: PromptSets, options: ShowOptions, count: int) -> str:
    """The error for a split without a prompt to show."""
    if count:
        return f"--start {options.start}: the split {options.split} has {count} prompts"
    counts = {"train": sum(sets.sizes), "held_out": len(sets.held_out)}
    counts |= {name: len(prompts) for name, prompts in sets.eval_sets.items()}
    others = [name for name, number in counts.items() if number]
    said = f"the split {options.split} has no prompts"
    if options.split == "train" and counts["held_out"]:
        said += (
            f": all {counts['held_out']} are held out, by their split or a hash of the question "
            "(prompts.0.held_out_share=0 holds none out)"
        )
    return f"{said}; give --split {' or '.join(others)}" if others else said


def _print_prompt(prompt: Prompt, shown: Shown | None, chars: int, console: Console) -> None:
    said = f"--- {prompt.id} ({prompt.place or 'made'}), task {prompt.task}, {prompt.split}"
    if shown is not None:
        said += f", {shown.tokens} tokens"
    _say(console, said)
    if shown is not None and shown.refusal:
        _say(console, f"a run leaves it out: {shown.refusal}")
    text = "\n".join(f"[{message.role}] {message.content}" for message in prompt.messages)
    if shown is not None and shown.text:
        text = shown.text
    _say(console, *text[:chars].split("\n"))
    if len(text) > chars:
        _say(console, f"... {len(text) - chars} more characters: --chars {len(text)}")
    _say(console, f"answer: {' or '.join(prompt.answers)[:chars]}")
    if prompt.entry:
        _say(console, f"entry: {prompt.entry[:chars]}")


def _print_counts(findings: Findings, console: Console) -> None:
    """A table whose rows add up: a row with several faults counts under the first."""
    counts = findings.counts
    table = Table("data check", "rows")
    table.add_row("prompts without a fault", str(findings.faultless))
    for reason, count in counts.most_common():
        table.add_row(f"fault: {reason}", str(count))
    table.add_row("read", str(findings.faultless + counts.total()))
    show_table(console, table)
    if not findings.faults:
        _say(console, "no faults")


def _as_json(findings: Findings) -> dict[str, object]:
    counts = findings.counts
    return {
        "rows": findings.faultless + counts.total(),
        "prompts": findings.faultless,
        "counts": dict(counts.most_common()),
        "faults": [fault._asdict() for fault in findings.faults],
        "notes": findings.notes,
    }


def _say(console: Console, *lines: str) -> None:
    """Print lines with texts of a data set, which must not move the cursor."""
    say(console, *map(printable, lines))
