"""The table of a sweep, on the terminal and as Markdown. Used by `megatron-rl sweep`."""

import math
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.sweep.results import Estimate, Figure, PairedDifference, Results, as_json

_COLUMNS = ("variant", "n", "mean", "to the baseline", "t", "higher/lower")
_MAX_DECIMALS = 9
_WITHOUT_ERROR = ".4g"


def print_table(results: Results, console: Console) -> None:
    """Print the table of all metrics, then the missing runs."""
    say(console, f"{results.plan.sweep.name}: {_legend(results)}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(_COLUMNS[0])
    for name in _COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for metric in results.plan.sweep.metrics:
        table.add_row(metric, style="bold")
        figures = [figure for figure in results.figures if figure.metric == metric]
        for figure in figures:
            name, *cells = row_of(figure, results.plan.baseline)
            table.add_row(f"  {name}", *cells, end_section=figure is figures[-1])
    show_table(console, table)
    say(console, *missing_lines(results))


def write_files(results: Results, sweep_dir: Path) -> None:
    """Write sweep.json and sweep.md, each atomically."""
    # msgspec writes NaN and infinity as null, which JSON lacks; sweep.md shows them.
    content = msgspec.json.format(msgspec.json.encode(as_json(results)), indent=2)
    write_whole(sweep_dir / "sweep.json", content + b"\n")
    write_whole(sweep_dir / "sweep.md", as_markdown(results))


def as_markdown(results: Results) -> str:
    lines = [f"# {results.plan.sweep.name}", "", f"{_legend(results)}."]
    for metric in results.plan.sweep.metrics:
        lines += ["", f"## {metric}", "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
        figures = [figure for figure in results.figures if figure.metric == metric]
        lines += [_line(row_of(figure, results.plan.baseline)) for figure in figures]
    return "\n".join([*lines, "", *(f"- {line}" for line in missing_lines(results))]) + "\n"


def row_of(figure: Figure, baseline: str) -> tuple[str, ...]:
    """Cells of a figure, in the order of the columns."""
    count = str(figure.estimate.n if figure.estimate else 0)
    head = (figure.variant, count, with_error(figure.estimate))
    if figure.variant == baseline:
        return (*head, "baseline", "", "")
    difference = figure.difference
    if difference is None:
        return (*head, "-", "-", "-")
    t = "-" if difference.t is None else f"{difference.t:+.2f}"
    return (*head, with_error(difference.difference, "+"), t, _sign_text(difference))


def with_error(estimate: Estimate | None, sign: str = "") -> str:
    """`0.660 +- 0.021`: the standard error with two digits, the mean with as many decimals.

    sign: "+" always shows the sign of the mean.
    """
    if estimate is None:
        return "not measured"
    error = estimate.standard_error
    if error is None:
        return f"{estimate.mean:{sign}{_WITHOUT_ERROR}}"
    if error == 0 or not math.isfinite(error):
        return f"{estimate.mean:{sign}{_WITHOUT_ERROR}} +- {error:g}"
    decimals = min(_MAX_DECIMALS, max(0, 1 - math.floor(math.log10(error))))
    return f"{estimate.mean:{sign}.{decimals}f} +- {error:.{decimals}f}"


def missing_lines(results: Results) -> list[str]:
    """A line per run that the figures exclude."""
    if not results.missing:
        count = len(results.runs)
        return ["The run is complete." if count == 1 else f"All {count} runs are complete."]
    complete = len(results.runs) - len(results.missing)
    lines = [f"{complete} of {len(results.runs)} runs are complete; the figures cover only these."]
    for result in results.missing:
        reason = f": {result.reason}" if result.reason else ""
        lines.append(f"{result.run.label} {result.state.value}{reason}")
    return lines


def _legend(results: Results) -> str:
    return (
        f"means over seeds +- standard errors; differences to {results.plan.baseline}, "
        "paired by seed"
    )


def _sign_text(difference: PairedDifference) -> str:
    p = "" if difference.sign_p is None else f", p={difference.sign_p:.3g}"
    return f"{difference.higher}/{difference.lower}{p}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
