"""`megatron-rl data grade PROMPTS`: samples every problem of a file by a model, and grades.

It runs an evaluation of one set (`runner.py`) with all rows of the file, of any split. `data
difficulty --samples` and `data code-tests --solutions` read its folder.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import DryRun, OneConfig, Overrides
from megatron_rl.cli.command_line.printing import say
from megatron_rl.cli.data_tools.files import ToolOptions, read_prompts
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.shipped import config_path
from megatron_rl.config.tree import Config
from megatron_rl.curation.rows import Row, encode_lines
from megatron_rl.curation.tool import check_at_least
from megatron_rl.evaluation.runs.runner import evaluate, lacking_text
from megatron_rl.launcher.run_folder import CONFIG
from megatron_rl.observe.deaths import until_death
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.rollout_queue.evaluation import recorded_problems

SET = "graded"
"""Name of the evaluation set, and so of figures and files."""
PROBLEMS = "problems.jsonl"
"""File with the rows, as an evaluation set."""


@dataclass(frozen=True, kw_only=True)
class GradeOptions(ToolOptions):
    model: Path
    """Hugging Face folder."""
    out: Path
    """Folder of the results; an existing one is resumed."""
    overrides: Overrides = field(default_factory=list)
    samples: int = 16
    """Number of completions per problem."""
    config: OneConfig = None
    temperature: float | None = None
    """Sampling temperature; default: sampling.temperature, as in training."""
    dry_run: DryRun = False


@command("grade", "Samples of every problem by a model, graded.")
def grade(options: GradeOptions, console: Console) -> int:
    """Exit code: 0, 1 (a role died), 2 (bad input)."""
    return until_death(lambda: _grade(options, console))


def _grade(options: GradeOptions, console: Console) -> None:
    check_at_least("--samples", options.samples, 1)
    config = grading_config(options)
    rows = read_prompts(options)
    check_questions(rows)
    folder = config.run.dir
    check_recorded(folder, rows, options.prompts)
    if options.dry_run:
        _check(config, rows, console)
        return
    path = folder / PROBLEMS
    if (folder / CONFIG).exists() and not path.exists():
        raise InputError(f"--out {folder} holds a run of another kind: name another folder")
    _make_folder(folder)
    write_whole(path, encode_lines([problem_line(row) for row in rows]))
    evaluate(config, SET, console, option="--out")


def _check(config: Config, rows: list[Row], console: Console) -> None:
    """Check the evaluation with a copy of the problems, and print its plan."""
    if (config.run.dir / CONFIG).exists():
        say(console, f"{config.run.dir} holds an earlier call: it would resume")
    with tempfile.TemporaryDirectory(prefix="megatron-rl-dry-") as name:
        path = Path(name) / PROBLEMS
        path.write_text(encode_lines([problem_line(row) for row in rows]))
        [wanted] = config.eval.sets
        source = wanted.prompts.model_copy(update={"path": path})
        sets = [wanted.model_copy(update={"prompts": source})]
        changed = {
            "run": config.run.model_copy(update={"dir": Path(name) / "run"}),
            "eval": config.eval.model_copy(update={"sets": sets}),
        }
        evaluate(
            config.model_copy(update=changed), SET, console, dry_in=config.run.dir, option="--out"
        )


def grading_config(options: GradeOptions) -> Config:
    """The given configuration with the problems as its only evaluation set."""
    config = load_config(
        None if options.config is None else config_path(options.config),
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
    # Only this model and these problems count, not the start of training.
    changed = {
        "model": config.model.model_dump() | {"megatron_path": None},
        "prompts": [],
        "stages": [],
        "eval": config.eval.model_dump() | {"prompts": 0, "sets": [wanted]},
    }
    return Config.model_validate(config.model_dump() | changed)


def problem_line(row: Row) -> dict[str, object]:
    """A row as a line of an evaluation set, which takes no train lines."""
    return row.line() | {"split": "held_out"}


def check_questions(rows: list[Row]) -> None:
    """Raise InputError for a repeated question, whose samples would mix."""
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.prompt.normalized_question, row)
        if other is not row:
            raise InputError(
                f"{row.prompt.place} asks what {other.prompt.place} asks: samples are kept by the "
                "question. Run `megatron-rl data dedupe` first"
            )


def check_recorded(folder: Path, rows: list[Row], given: Path) -> None:
    """Raise InputError for rows without the problems that the folder has completions of.

    Under an id from the line number another file has another problem.
    """
    row_of = {f"{SET}/{row.prompt.id}": row for row in rows}
    lacking = []
    for name, record in recorded_problems(folder, f"{SET}.{SET}").items():
        row = row_of.get(name)
        is_same = row is not None and row.prompt.question == record.problem
        if not is_same and (row is None or "id" not in row.fields):
            lacking.append(name.removeprefix(f"{SET}/"))
    if lacking:
        raise InputError(lacking_text(folder, lacking, f"the rows of {given}", "--out"))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder --out {folder}: {error.strerror}") from error
