"""`megatron-rl init`: writes a configuration from the answers to five questions."""

import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.paths import is_hub_name
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.tables.folders import list_splits
from megatron_rl.data.tables.source import is_in_our_form
from megatron_rl.launcher.placement import listed_gpus, place
from megatron_rl.protocol.whole_file import write_whole

_QUESTIONS = {
    "model": "Model: a folder with config.json, or a name of the Hugging Face Hub",
    "data": "Data: a file or folder of questions and answers, or a name of the Hub",
    "task": f"Task: one of {', '.join(RewardConfig().all_tasks)}",
    "gpus": "GPUs of this node that the run may use (0: CPU cores alone)",
    "steps": "Training steps",
}
_EMULATED = 'dtype = "float32"  # this processor has no bfloat16'


@dataclass(frozen=True)
class InitOptions:
    """Options of `init`; it asks for each missing option."""

    file: Annotated[Path, typer.Argument(metavar="FILE")] = Path("my.toml")
    """TOML file to write."""
    model: str | None = None
    """Model folder, or a name of the Hub."""
    data: str | None = None
    """Data file or folder, or a Hub name."""
    task: str | None = None
    """Task of the questions, such as math."""
    gpus: int | None = None
    """GPUs of this node; 0: CPU cores."""
    steps: int | None = None
    """Training steps."""


@command("init", "Write a configuration: answers to five questions.")
def init(options: InitOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input; nothing is written)."""
    if options.file.exists():
        raise InputError(f"{options.file} exists: name another file, or remove it")
    answers = _answers(options)
    gpus, steps = _whole(answers, "gpus", least=0), _whole(answers, "steps", least=1)
    model, data = (_seen_from(options.file.parent, answers[name]) for name in ("model", "data"))
    text = configuration(model, data, answers["task"], gpus, steps, splits=_splits(answers["data"]))
    options.file.parent.mkdir(parents=True, exist_ok=True)
    partial = options.file.with_name(f"{options.file.name}.partial")
    partial.write_text(text)
    try:
        config = load_config(partial, [override("run.dir", "runs/mine")])
        if gpus:
            place(config, nodes=1, gpus_per_node=gpus)
    finally:
        partial.unlink()
    write_whole(options.file, text)
    file = shlex.quote(str(options.file))
    card = f"megatron-rl plan {file}" if gpus else ""
    absent = [
        f"warning: {name} {answers[name]} is not on this machine"
        for name in ("model", "data")
        if not _is_name(answers[name]) and not Path(answers[name]).expanduser().exists()
    ]
    lines = [
        *absent,
        *_unread(config.prompts[0], answers["data"]),
        f"Wrote {options.file}. Next:",
        *([f"  {card}    # memory and seconds of a step; does it fit?"] if card else []),
        f"  megatron-rl run --config {file} --dry-run    # data, rewards, layout",
        f"  megatron-rl run --config {file}",
    ]
    say(console, "\n".join(lines))
    return 0


def _unread(source: PromptSource, given: str) -> list[str]:
    """A warning about data on this machine whose columns a run would not find."""
    if not Path(given).expanduser().exists():
        return []
    try:
        is_in_our_form(source)
    except InputError as error:
        return [f"warning: a run would refuse the data as it is: {error}"]
    return []


def _answers(options: InitOptions) -> dict[str, str]:
    """Question -> answer, from the command line or the user. Raises InputError."""
    given = {name: getattr(options, name) for name in _QUESTIONS}
    missing = [name for name, value in given.items() if value is None]
    if missing and not sys.stdin.isatty():
        raise InputError(f"give {' '.join(f'--{name}' for name in missing)}: nobody can be asked")
    defaults = {"task": "math", "gpus": str(len(listed_gpus())), "steps": "200"}
    for name in missing:
        given[name] = typer.prompt(_QUESTIONS[name], default=defaults.get(name))
    return {name: str(value) for name, value in given.items()}


def _whole(answers: dict[str, str], name: str, *, least: int) -> int:
    text = answers[name]
    if not text.isdigit() or int(text) < least:
        raise InputError(f"{name}={text!r} is not a whole number of at least {least}")
    return int(text)


def _is_name(given: str) -> bool:
    """Whether it is a name of the Hub, and no file or folder here."""
    return is_hub_name(given) and not Path(given).expanduser().exists()


def _seen_from(folder: Path, given: str) -> str:
    """A model or data as a file in `folder` writes it: relative paths are relative to the file."""
    path = Path(given).expanduser()
    is_here = folder.resolve() == Path.cwd()
    return given if is_here or path.is_absolute() or _is_name(given) else relpath(path, folder)


def configuration(
    model: str, data: str, task: str, gpus: int, steps: int, *, splits: Collection[str] = ()
) -> str:
    """The file's text.

    gpus: of one node; trainer and engines take half each. splits: of the data's folder.
    """
    if task not in RewardConfig().all_tasks:
        raise InputError(f"task {task!r} is none of {', '.join(RewardConfig().all_tasks)}")
    parts = [
        "# Written by `megatron-rl init`. All other keys: `megatron-rl config`.\n[model]",
        _line("path", model),
        *([] if gpus or _has_bfloat16() else [_EMULATED]),
        "\n[[prompts]]",
        *_source(data),
        *(['dataset_split = "train"'] if splits else []),
        _line("task", task),
        f"\n[train]\nsteps = {steps}",
        *_sizes(gpus),
        *_evaluation(data, splits, is_short=not gpus),
        '\n[run]\ndir = "runs/mine"\n',
    ]
    return "\n".join(parts)


def _has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 numbers by itself; without, it is far slower."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def _source(data: str) -> list[str]:
    if _is_name(data):
        return ['kind = "hub"', _line("name", data)]
    return [_line("path", data)]


def _splits(data: str) -> set[str]:
    """Splits of a folder that has the split "train" and others; else none."""
    found = {split for _, split in list_splits(Path(data).expanduser())}
    return found if "train" in found and len(found) > 1 else set()


def _evaluation(data: str, splits: Collection[str], *, is_short: bool) -> list[str]:
    """The held-out split of a folder; the first 32 prompts, once each, if it is to be short."""
    lines = ["\n[eval]  # short, for CPU cores", "samples = 1"] if is_short else []
    other = next((split for split in ("test", "validation") if split in splits), None)
    if other is not None:
        of_set = f'{_line("path", data)}, dataset_split = "{other}"'
        lines += ["\n[[eval.sets]]", f'name = "{other}"', f"prompts = {{{of_set}}}"]
    if is_short:
        lines.append("prompts = 32" if other is None else "problems = 32")
    return lines


def _line(key: str, value: str) -> str:
    return override(key, value).replace("=", " = ", 1)


def _sizes(gpus: int) -> list[str]:
    """Batch, lengths and layout: small without a GPU, one shared GPU, or several divided."""
    if not gpus:
        sizes = "prompts_per_batch = 4  # for CPU cores; 16 and more with GPUs\ngroup_size = 8"
        return [sizes, "\n[sampling]\nmax_new_tokens = 256  # tokens of a completion, at most"]
    lengths = "\n[sampling]\nmax_new_tokens = 3072  # tokens of a completion, at most"
    lengths += "\n\n[generator]\ncontext_tokens = 4096  # prompt and completion"
    if gpus == 1:
        lengths += "\ncolocate = true  # trainer and engine share the GPU"
        return [lengths, '\n[weights]\nmethod = "ipc"  # as NCCL ranks cannot share a GPU']
    replicas = gpus // 2
    return [
        f"{lengths}\nreplicas = {replicas}  # engines, on a GPU each",
        f"\n[parallel]\ndata = {gpus - replicas}  # copies of the model in the trainer; "
        "tensor = 2 and more divides it",
    ]
