"""`megatron-rl analyse weights | plane | lengths`: analyses into one folder, with a report.

Each command replaces its section of OUT/analysis.json and draws the report anew.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rl.config.errors import InputError
from megatron_rl.launcher.whole_file import write_whole

if TYPE_CHECKING:
    from megatron_rl.analysis.results import Analysis, WeightsResult

_DTYPES = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    kinds = parser.add_subparsers(dest="analysis", required=True)
    weights = kinds.add_parser("weights", help="principal directions of checkpoints")
    weights.add_argument("models", type=Path, nargs="+", help="model folders, runs, checkpoints")
    weights.add_argument("--centre", choices=["mean", "first"], default="mean")
    weights.add_argument(
        "--files-from", type=Path, help="folder with config.json and tokenizer that others lack"
    )
    plane = kinds.add_parser(
        "plane", help="models over the first two directions, and their figures"
    )
    what = plane.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="GRID", help="write models to this folder")
    what.add_argument("--read", type=Path, metavar="GRID", help="collect their eval.json")
    plane.add_argument("--points", type=int, default=5, help="a side (default: %(default)s)")
    plane.add_argument(
        "--margin", type=float, default=0.25, help="beyond checkpoints (default: %(default)s)"
    )
    plane.add_argument("--dtype", choices=_DTYPES, help="default: that of the first checkpoint")
    plane.add_argument("--at-most", type=int, help="write no more points than so many now")
    plane.add_argument("--set", dest="set_name", help="evaluation set; needed if there are several")
    lengths = kinds.add_parser("lengths", help="reward against log(length) of a run's rollouts")
    lengths.add_argument("run_dir", type=Path)
    for kind, handler in ((weights, _weights), (plane, _plane), (lengths, _lengths)):
        kind.set_defaults(handler=handler)
        kind.add_argument("--out", type=Path, required=True, help="folder of the report")
        kind.add_argument("--no-plots", action="store_true")


def _weights(options: argparse.Namespace, console: Console) -> int:
    # Needs torch, which most commands do without; so below.
    from megatron_rl.analysis.checkpoints import find_checkpoints, open_checkpoints
    from megatron_rl.analysis.gram import gram_matrix
    from megatron_rl.analysis.principal import principal_directions
    from megatron_rl.analysis.results import weights_result

    checkpoints = find_checkpoints(options.models, options.files_from)
    analysis = _begin(options)
    options.out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    # Scratch files lie beside the report: the system's folder may be in memory.
    with (
        tempfile.TemporaryDirectory(dir=options.out, prefix=".scratch.") as scratch,
        open_checkpoints(checkpoints, Path(scratch)) as opened,
        bar,
    ):
        task = bar.add_task("weights", total=None)
        gram = gram_matrix(
            opened,
            options.centre,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        parameters = opened.parameters
    principal = principal_directions(gram, options.centre)
    found = weights_result(
        checkpoints, gram, principal, centre=options.centre, parameters=parameters
    )
    # A plane of other directions would be drawn into these.
    _write(options, msgspec.structs.replace(analysis, weights=found, plane=None), console)
    return 0


def _plane(options: argparse.Namespace, console: Console) -> int:
    from megatron_rl.analysis.grid import collect_grid

    analysis = _begin(options)
    if analysis.weights is None:
        raise InputError(
            f"{options.out} has no directions yet: first megatron-rl analyse weights MODELS "
            f"--out {options.out}"
        )
    if options.write is not None:
        return _write_grid(options, analysis.weights, console)
    found = collect_grid(options.read, analysis.weights, options.set_name)
    _write(options, msgspec.structs.replace(analysis, plane=found), console)
    return 0


def _write_grid(options: argparse.Namespace, weights: "WeightsResult", console: Console) -> int:
    from megatron_rl.analysis.grid import plan_grid, points_left, write_grid
    from megatron_rl.analysis.point import PointFormat
    from megatron_rl.weights.folders.conversion import DTYPES

    if options.margin < 0:
        raise InputError(f"--margin {options.margin}: give a share of the extent, 0 or more")
    if options.at_most is not None and options.at_most < 1:
        raise InputError(f"--at-most {options.at_most}: give 1 or more")
    grid = plan_grid(weights, options.points, options.margin, options.dtype)
    form = PointFormat(None if options.dtype is None else DTYPES[options.dtype])
    written = write_grid(
        weights, grid, options.write, form, at_most=options.at_most, save=write_whole
    )
    for name in written:
        _say(console, str(options.write / name))
    left = len(points_left(grid, options.write))
    _say(console, f"{left} of {len(grid.points)} points left to write")
    return 0


def _lengths(options: argparse.Namespace, console: Console) -> int:
    from megatron_rl.analysis.lengths import fit_lengths

    found = fit_lengths(options.run_dir)
    analysis = _begin(options)
    _write(options, msgspec.structs.replace(analysis, lengths=found), console)
    return 0


def _begin(options: argparse.Namespace) -> "Analysis":
    """What --out has already. Raises InputError, also where plots cannot be drawn."""
    from megatron_rl.analysis.plots import check_library
    from megatron_rl.analysis.results import read_analysis

    if not options.no_plots:
        check_library()
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is no folder")
    return read_analysis(options.out)


def _write(options: argparse.Namespace, analysis: "Analysis", console: Console) -> None:
    """Write analysis.json, the plots and analysis.md, and print the last."""
    from megatron_rl.analysis import plots, report, results

    text = report.render(analysis, with_plots=not options.no_plots)
    drawn = {} if options.no_plots else plots.draw_all(analysis)
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / results.FILE, results.to_json(analysis))
    for name, image in drawn.items():
        write_whole(options.out / name, image)
    write_whole(options.out / report.FILE, text)
    _say(console, text)
    _say(console, f"Report: {options.out / report.FILE}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
