"""The sweep file: variants, seeds and metrics. Used by `megatron-rl sweep`."""

import tomllib
from pathlib import Path
from typing import Self

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import from_folder
from megatron_rl.config.lookup import nearest
from megatron_rl.config.section import Section
from megatron_rl.sweep.measures import check_metric

_NAME = r"^[A-Za-z0-9][\w.+-]*$"
_OF_THE_SWEEP = ("run.dir", "run.seed")
_FILES = ("lock", "sweep.json", "sweep.md")
"""Files in the sweep's folder: no variant may have these names."""
Scalar = bool | int | float | str


class Variant(Section):
    """A variant to compare."""

    name: str = Field(pattern=_NAME)
    """Name of its folder and its row of the table."""
    overrides: list[str] = []
    """`section.key=value`, applied after the common overrides."""


class SlurmConfig(Section):
    """Resources of each run's job with `--slurm`."""

    nodes: PositiveInt = 1
    """Nodes of a run."""
    gpus_per_node: NonNegativeInt = 8
    """GPUs per node; 0 requests none."""
    time: str = "1-00:00:00"
    """Time limit of a job in Slurm's format; a job submitted again resumes its run."""
    gpu: str = "h100-80g"
    """GPU of the plan before the run (`megatron-rl plan --gpu`)."""
    options: list[str] = []
    """More options of sbatch, such as "--partition=gpu"."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for option in self.options:
            if not option.startswith("--") or "\n" in option:
                raise ValueError(f"slurm.options: {option!r} is not of the form --name=value")
        return self


class SweepFile(Section):
    """A sweep: variants x grid x seeds."""

    name: str = Field(pattern=_NAME)
    """Name in the default folder, runs/sweep-NAME, and of Slurm's jobs."""
    base: Path
    """Configuration of all runs; relative to the sweep file."""
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    """Values of run.seed for every variant."""
    baseline: str | None = None
    """Variant to compare the others with; None: the first."""
    metrics: list[str] = Field(default=["accuracy_after", "reward_last10", "step_s"], min_length=1)
    """Keys of summary.json (nested with a dot: wall_s.rl), step_s, or metrics with a slash, which
    are averaged over the last steps; docs/sweeps.md."""
    overrides: list[str] = []
    """`section.key=value` of all variants."""
    timeout_s: PositiveFloat = 86_400.0
    """Time limit of a run in seconds; a longer run counts as failed."""
    variants: list[Variant] = []
    grid: dict[str, list[Scalar]] = {}
    """Configuration key -> values; all combinations, for each variant."""
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.variants and not self.grid:
            raise ValueError("there is nothing to compare: give [[variants]], or a [grid]")
        _check_unique("seeds", self.seeds)
        names = [variant.name for variant in self.variants]
        _check_unique("variants", names)
        if taken := sorted(set(names) & set(_FILES)):
            raise ValueError(f"variants: {taken[0]!r} is a file of the sweep: give another name")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key!r} has no values")
            # 1 and true are equal in Python.
            _check_unique(f"grid.{key!r}", [(type(value), value) for value in values])
        for name in self.metrics:
            check_metric(name)
        self._check_keys()
        return self

    def _check_keys(self) -> None:
        """Refuse run.dir, run.seed, and keys that both a variant and the grid set."""
        everywhere = [*map(key_of, self.overrides), *self.grid]
        check_own_keys(everywhere)
        for variant in self.variants:
            keys = [key_of(text) for text in variant.overrides]
            check_own_keys(keys)
            if both := sorted(set(keys) & set(self.grid)):
                raise ValueError(
                    f"variant {variant.name!r} and the grid both set {', '.join(both)}: "
                    "leave it to one of them"
                )


def key_of(override: str) -> str:
    """The key that `section.key=value` sets."""
    return override.partition("=")[0].strip()


def check_own_keys(keys: list[str]) -> None:
    """Raise ValueError when an override sets run.dir or run.seed."""
    for key in keys:
        if key in _OF_THE_SWEEP:
            raise ValueError(
                f"{key} is set by the sweep, for each run: leave it out "
                "(seeds = [...] gives the seeds, --sweep-dir the folder)"
            )


def load_sweep(path: Path) -> SweepFile:
    """The sweep of a TOML file, with `base` absolute. Raises InputError with all errors."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the sweep {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    try:
        sweep = SweepFile.model_validate(tree)
    except pydantic.ValidationError as error:
        raise InputError(
            f"the sweep {path} is wrong:\n  " + "\n  ".join(_explain(error))
        ) from error
    folder = path.resolve().parent
    variants = [
        one.model_copy(update={"overrides": [from_folder(text, folder) for text in one.overrides]})
        for one in sweep.variants
    ]
    return sweep.model_copy(
        update={
            "base": (folder / sweep.base).resolve(),
            "overrides": [from_folder(text, folder) for text in sweep.overrides],
            "variants": variants,
        }
    )


def _explain(error: pydantic.ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        location = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {location!r}{_nearest(item['loc'])}")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        else:
            given = "" if item["type"] == "missing" else f" (given: {item['input']!r:.80})"
            lines.append(f"{location}: {item['msg']}{given}")
    return lines


def _nearest(location: tuple[int | str, ...]) -> str:
    sections = {"variants": Variant, "slurm": SlurmConfig}
    section = sections.get(str(location[0]), SweepFile) if len(location) > 1 else SweepFile
    return nearest(str(location[-1]), section.model_fields)


def _check_unique(what: str, values: list) -> None:
    twice = [value for number, value in enumerate(values) if value in values[:number]]
    if twice:
        raise ValueError(f"{what}: {twice[0]!r} is given twice")
