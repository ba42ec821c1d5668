"""`megatron-rl data grade PROMPTS`: samples of every problem of a file by a model, graded.

An evaluation of one set (`runner.py`), whose problems are all rows of the file, whatever their
split. `data difficulty --samples` and `data code-tests --solutions` read the folder that it leaves.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.tree import Config
from megatron_rl.data.options import check_at_least
from megatron_rl.data.rows import Row, encode_lines, read_rows
from megatron_rl.launcher.evaluation.runner import evaluate
from megatron_rl.launcher.run_folder import CONFIG
from megatron_rl.launcher.whole_file import write_whole

SET = "graded"
"""Name of the set, and so of figures and files."""
PROBLEMS = "problems.jsonl"
"""File of the folder: the rows, as an evaluation set."""


def add_arguments(
    parser: argparse.ArgumentParser, until_death: Callable[[Callable[[], None]], int]
) -> None:
    """Arguments of the command; until_death: exit code of work whose processes may die."""
    parser.add_argument("prompts", type=Path, help="JSONL of prompts")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--samples", type=int, default=16, help="a problem; default %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="folder; the same one goes on")
    parser.add_argument("--config", type=Path, help="TOML file of the engine, rewards, rendering")
    parser.add_argument("--task", default="math", help="of lines that name none (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, help="default: sampling.temperature, as in training"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.set_defaults(
        handler=lambda options, console: until_death(lambda: _grade(options, console))
    )


def _grade(options: argparse.Namespace, console: Console) -> None:
    check_at_least("--samples", options.samples, 1)
    config = grading_config(options)
    rows = read_rows(options.prompts, task=options.task)
    check_questions(rows)
    folder = config.run.dir
    path = folder / PROBLEMS
    if (folder / CONFIG).exists() and not path.exists():
        raise InputError(f"--out {folder} holds a run of another kind: name another folder")
    _make_folder(folder)
    write_whole(path, encode_lines([problem_line(row) for row in rows]))
    evaluate(config, SET, console)


def grading_config(options: argparse.Namespace) -> Config:
    """The configuration of the evaluation: that of the file, with the problems as its one set."""
    config = load_config(
        options.config,
        [
            *options.overrides,
            override("model.path", str(options.model)),
            override("run.dir", str(options.out.resolve())),
        ],
    )
    temperature = options.temperature
    wanted = {
        "name": SET,
        "samples": options.samples,
        "temperature": config.sampling.temperature if temperature is None else temperature,
        "prompts": {"path": config.run.dir / PROBLEMS, "task": options.task},
    }
    # What is asked for is this folder and these problems, whatever training began with.
    changed = {
        "model": config.model.model_dump() | {"megatron_path": None},
        "prompts": [],
        "stages": [],
        "eval": config.eval.model_dump() | {"prompts": 0, "sets": [wanted]},
    }
    return Config.model_validate(config.model_dump() | changed)


def problem_line(row: Row) -> dict[str, object]:
    """A row as a line of an evaluation set, which takes no line to train on."""
    return row.line() | {"split": "held_out"}


def check_questions(rows: list[Row]) -> None:
    """Raise InputError where two rows ask the same: samples could not be told apart."""
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.prompt.normalized_question, row)
        if other is not row:
            raise InputError(
                f"{row.prompt.place} asks what {other.prompt.place} asks: samples are kept by the "
                "question. Run `megatron-rl data dedupe` first"
            )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder --out {folder}: {error.strerror}") from error
