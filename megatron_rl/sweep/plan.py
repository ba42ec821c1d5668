"""Plans the runs of a sweep and loads their configurations. Used by `megatron-rl sweep`."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config, override
from megatron_rl.config.tree import Config, RunConfig
from megatron_rl.sweep.sweep_file import Scalar, SweepFile, Variant, check_own_keys, key_of

_NOT_FOR_NAMES = re.compile(r"[^\w.+=-]+")
_NAME_BYTES = 255
"""Limit of file systems for a folder's name."""


@dataclass(frozen=True)
class PlannedRun:
    """One run: a variant with a seed."""

    variant: str
    seed: int
    run_dir: Path
    """Absolute."""
    base: Path
    overrides: tuple[str, ...]
    """All overrides but run.dir."""
    config: Config

    @property
    def label(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def arguments(self) -> list[str]:
        place = ["--config", str(self.base), "--run-dir", str(self.run_dir)]
        return ["run", *place, *self.overrides]


@dataclass(frozen=True)
class Plan:
    sweep: SweepFile
    sweep_dir: Path
    """Absolute."""
    variants: dict[str, tuple[str, ...]]
    """Overrides of each, without the common ones."""
    baseline: str
    runs: tuple[PlannedRun, ...]
    """Seed by seed: every variant runs once before any runs again."""

    @property
    def same_configurations(self) -> list[tuple[str, str]]:
        """(earlier variant, variant) pairs with equal configurations."""
        first: dict[str, Config] = {}
        pairs = []
        for run in self.runs[: len(self.variants)]:
            config = run.config.model_copy(update={"run": RunConfig()})
            pairs += [(name, run.variant) for name, other in first.items() if other == config][:1]
            first[run.variant] = config
        return pairs


def make_plan(sweep: SweepFile, sweep_dir: Path, overrides: Sequence[str] = ()) -> Plan:
    """Plan a sweep. Raises InputError with the errors of all variants.

    overrides: command-line overrides of all variants. They take precedence over the file's common
    overrides, and a variant's overrides over both.
    """
    variants = dict(_expand(sweep))
    baseline = sweep.baseline or next(iter(variants))
    problems = _naming_problems(baseline, list(variants))
    try:
        check_own_keys([key_of(text) for text in overrides])
    except ValueError as error:
        problems.append(str(error))
    common = (*sweep.overrides, *overrides)
    runs = []
    for seed in sweep.seeds:
        for name, own in variants.items():
            run_dir = sweep_dir.absolute() / name / f"seed-{seed}"
            whole = (*common, *own, f"run.seed={seed}")
            try:
                config = load_config(sweep.base, [*whole, override("run.dir", str(run_dir))])
                if config.train.epochs:
                    raise ConfigError("a sweep compares runs by steps: give train.steps, no epochs")
            except ConfigError as error:
                text = f"variant {name}: {error}"
                problems += [text] if text not in problems else []
                continue
            runs.append(PlannedRun(name, seed, run_dir, sweep.base, whole, config))
    if problems:
        raise InputError(f"the sweep {sweep.name} cannot start:\n" + "\n".join(problems))
    return Plan(sweep, sweep_dir.absolute(), variants, baseline, tuple(runs))


def _expand(sweep: SweepFile) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, overrides) of each variant in file order. Raises InputError for equal names."""
    seen: set[str] = set()
    short = _short_names(list(sweep.grid))
    for variant in sweep.variants or [None]:
        for values in itertools.product(*sweep.grid.values()):
            cell = dict(zip(sweep.grid, values, strict=True))
            name = _variant_name(variant, {short[key]: value for key, value in cell.items()})
            if name in seen:
                raise InputError(f"two variants are named {name}: their values look alike")
            seen.add(name)
            own = variant.overrides if variant else []
            yield name, (*own, *(_grid_override(key, value) for key, value in cell.items()))


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last part of each key where it is unique, else the key."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


def _variant_name(variant: Variant | None, cell: dict[str, Scalar]) -> str:
    parts = [_NOT_FOR_NAMES.sub("-", f"{key}={_text(value)}") for key, value in cell.items()]
    return ",".join([*([variant.name] if variant else []), *parts])


def _grid_override(key: str, value: Scalar) -> str:
    return override(key, value) if isinstance(value, str) else f"{key}={_text(value)}"


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _naming_problems(baseline: str, names: list[str]) -> list[str]:
    problems = [
        f"the name of variant {name} is longer than {_NAME_BYTES} bytes: give [[variants]] with "
        "short names instead of the grid"
        for name in names
        if len(name.encode()) > _NAME_BYTES
    ]
    if baseline not in names:
        known = ", ".join(names)
        problems.append(f"baseline {baseline!r} is none of the variants, which are: {known}")
    return problems
