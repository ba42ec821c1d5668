"""`megatron-rl analyse weights | plane | lengths`: analyses into one folder, with a report.

Each command replaces its section of OUT/analysis.json and draws the report again.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command, group
from megatron_rl.cli.command_line.parameters import DryRun, RunFolder
from megatron_rl.cli.command_line.printing import check_plots, counted, progress, say
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import write_whole

if TYPE_CHECKING:
    from megatron_rl.analysis.results import Analysis, WeightsResult

group(__name__, "Analyses of a run or of checkpoints, into one folder with a report.")
_NOTHING = "Dry run: nothing was written."
Out = Annotated[Path, typer.Option(help="Folder of the report.")]
NoPlots = Annotated[bool, typer.Option("--no-plots", help="Write no plots.")]


@dataclass(frozen=True)
class WeightsOptions:
    models: Annotated[list[Path], typer.Argument()]
    """Model folders, runs, checkpoints."""
    out: Out
    centre: Literal["mean", "first"] = "mean"
    files_from: Path | None = None
    """Folder with config.json and tokenizer for checkpoints without them."""
    no_plots: NoPlots = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class PlaneOptions:
    out: Out
    write: Annotated[Path | None, typer.Option(metavar="GRID")] = None
    """Folder for the models of the grid."""
    read: Annotated[Path | None, typer.Option(metavar="GRID")] = None
    """Folder with evaluated models, whose eval.json files are collected."""
    points: int = 5
    """Number of points on a side of the grid."""
    margin: float = 0.25
    """Margin of the grid around the checkpoints, as a share of their extent."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Dtype of the models; default: that of the first checkpoint."""
    at_most: int | None = None
    """Maximum number of models to write now; default: all."""
    set_name: Annotated[str | None, typer.Option("--set", metavar="NAME")] = None
    """Evaluation set to read, if there are several."""
    no_plots: NoPlots = False
    dry_run: DryRun = False


@dataclass(frozen=True)
class LengthsOptions:
    run_dir: RunFolder
    out: Out
    no_plots: NoPlots = False


@command("weights", "Principal directions of checkpoints.")
def weights(options: WeightsOptions, console: Console) -> int:
    # torch is slow to load; so below.
    from megatron_rl.analysis.checkpoints import find_checkpoints, open_checkpoints
    from megatron_rl.analysis.principal import gram_matrix, principal_directions
    from megatron_rl.analysis.results import weights_result

    checkpoints = find_checkpoints(options.models, options.files_from)
    analysis = _begin(options)
    if options.dry_run:
        for one in checkpoints:
            say(console, f"would compare {one.name}: {one.folder}")
        say(console, f"would write {options.out}; scratch files in the same folder. {_NOTHING}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    # Not in the system's temporary folder, which may be in memory.
    with (
        tempfile.TemporaryDirectory(dir=options.out, prefix=".scratch.") as scratch,
        open_checkpoints(checkpoints, Path(scratch)) as opened,
        progress(console, "parameters") as report,
    ):
        gram = gram_matrix(opened, options.centre, progress=report)
        parameters = opened.parameters
    principal = principal_directions(gram, options.centre)
    found = weights_result(
        checkpoints, gram, principal, centre=options.centre, parameters=parameters
    )
    # An earlier plane has other directions.
    _write(options, msgspec.structs.replace(analysis, weights=found, plane=None), console)
    return 0


@command("plane", "Models over the first two directions, and their figures.")
def plane(options: PlaneOptions, console: Console) -> int:
    from megatron_rl.analysis.grid import collect_grid

    if (options.write is None) == (options.read is None):
        raise InputError("give either --write GRID or --read GRID")
    analysis = _begin(options)
    if analysis.weights is None:
        raise InputError(
            f"{options.out} has no directions yet: first megatron-rl analyse weights MODELS "
            f"--out {options.out}"
        )
    if options.write is not None:
        return _write_grid(options, analysis.weights, console)
    assert options.read is not None
    found = collect_grid(options.read, analysis.weights, options.set_name)
    _write(options, msgspec.structs.replace(analysis, plane=found), console)
    return 0


def _write_grid(options: PlaneOptions, weights: "WeightsResult", console: Console) -> int:
    from megatron_rl.analysis.grid import PointFormat, plan_grid, points_left, write_grid
    from megatron_rl.weights.folders.conversion import DTYPES

    if options.margin < 0:
        raise InputError(f"--margin {options.margin}: give a share of the extent, 0 or more")
    if options.at_most is not None and options.at_most < 1:
        raise InputError(f"--at-most {options.at_most}: give 1 or more")
    assert options.write is not None
    grid = plan_grid(weights, options.points, options.margin, options.dtype)
    form = PointFormat(None if options.dtype is None else DTYPES[options.dtype])
    left = len(points_left(grid, options.write))
    count = left if options.at_most is None else min(left, options.at_most)
    if options.dry_run:
        each = sum(path.stat().st_size for path in Path(grid.checkpoints[0]).glob("*.safetensors"))
        say(console, f"would write {count} of {left} models that are not there to "
             f"{options.write}, {each / 1e9:.3g} GB each. {_NOTHING}")  # fmt: skip
        return 0
    written = write_grid(weights, grid, options.write, form, at_most=options.at_most)
    with progress(console, "models") as report:
        for name in counted(written, count, report):
            say(console, str(options.write / name))
    left = len(points_left(grid, options.write))
    say(console, f"{left} of {len(grid.points)} points left to write")
    return 0


@command("lengths", "Reward against log(length) of a run's rollouts.")
def lengths(options: LengthsOptions, console: Console) -> int:
    from megatron_rl.analysis.lengths import fit_lengths
    from megatron_rl.observe.missing_records import warn_of_missing

    warn_of_missing(options.run_dir)
    found = fit_lengths(options.run_dir)
    analysis = _begin(options)
    _write(options, msgspec.structs.replace(analysis, lengths=found), console)
    return 0


def _begin(options: WeightsOptions | PlaneOptions | LengthsOptions) -> "Analysis":
    """The analysis in --out so far. Raises InputError, also if plots cannot be drawn."""
    from megatron_rl.analysis.results import read_analysis

    if not options.no_plots:
        check_plots("give --no-plots")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is no folder")
    return read_analysis(options.out)


def _write(
    options: WeightsOptions | PlaneOptions | LengthsOptions, analysis: "Analysis", console: Console
) -> None:
    """Write analysis.json, the plots and analysis.md; print analysis.md."""
    from megatron_rl.analysis import plots, report, results

    text = report.render(analysis, with_plots=not options.no_plots)
    drawn = {} if options.no_plots else plots.draw_all(analysis)
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / results.FILE, results.to_json(analysis))
    for name, image in drawn.items():
        write_whole(options.out / name, image)
    write_whole(options.out / report.FILE, text)
    say(console, text)
    say(console, f"Report: {options.out / report.FILE}")
