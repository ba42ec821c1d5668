"""analysis.md: tables and plots of an analysis. Used by `megatron-rl analyse`. Pure functions."""

from collections.abc import Iterator, Sequence

from megatron_rl.analysis import plots
from megatron_rl.analysis.lengths import LengthsResult, LineFit
from megatron_rl.analysis.results import Analysis, PlaneResult, WeightsResult

FILE = "analysis.md"
_SHOWN_DIRECTIONS = 6
AUTOCORRELATED = 0.3


def render(analysis: Analysis, *, with_plots: bool) -> str:
    """Markdown of all sections of the analysis."""
    lines = ["# Analysis", ""]
    if analysis.weights is not None:
        lines += [*_weights(analysis.weights), ""]
        lines += _images(with_plots, plots.PATH, plots.EXPLAINED)
    if analysis.plane is not None:
        lines += [*_plane(analysis.plane), ""]
        lines += _images(with_plots, plots.SURFACE)
    if analysis.lengths is not None:
        lines += [*_lengths(analysis.lengths), ""]
        lines += _images(with_plots, plots.FIT)
    return "\n".join(lines)


def _images(with_plots: bool, *names: str) -> Iterator[str]:
    for name in names if with_plots else ():
        yield f"![{name.removesuffix('.png')}]({name})"
        yield ""


def _weights(found: WeightsResult) -> Iterator[str]:
    centre = "their mean" if found.centre == "mean" else "the first one"
    yield "## Checkpoints in weight space"
    yield ""
    yield (
        f"{len(found.checkpoints)} checkpoints of {found.parameters:,} parameters; differences "
        f"from {centre}. Distances are Euclidean."
    )
    yield ""
    rows = [
        [
            one.name,
            *(f"{value:.4g}" for value in [*one.coordinates, 0.0][:2]),
            f"{one.off_plane:.3g}",
            f"{one.from_first:.4g}",
            _maybe(one.from_previous),
            _maybe(one.step_cosine),
        ]
        for one in found.checkpoints
    ]
    head = ["checkpoint", "direction 1", "direction 2", "off the plane", "from the first"]
    yield from _table([*head, "from the previous", "cosine to the previous step"], rows)
    yield ""
    shares = list(zip(found.explained, found.random_walk, strict=False))[:_SHOWN_DIRECTIONS]
    yield from _table(
        ["direction", "explains", "of a random walk"],
        [[str(n), f"{own:.2%}", f"{walk:.2%}"] for n, (own, walk) in enumerate(shares, 1)],
    )


def _plane(found: PlaneResult) -> Iterator[str]:
    yield "## Reward and length over the plane"
    yield ""
    missing = f" Not evaluated: {', '.join(found.missing)}." if found.missing else ""
    yield f"{len(found.points)} points of {found.grid}, evaluation set {found.set_name}.{missing}"
    yield ""
    rows = []
    for point in found.points:
        figures = (point.figures.reward, point.figures.accuracy, point.figures.length_tokens)
        places = [f"{point.first:.4g}", f"{point.second:.4g}"]
        values = [_with_error(figure.value, figure.se) for figure in figures]
        rows.append([point.name, *places, *values, _maybe(point.rounding)])
    head = ["point", "direction 1", "direction 2", "reward", "accuracy", "length, tokens"]
    yield from _table([*head, "off its place by rounding"], rows)


def _lengths(found: LengthsResult) -> Iterator[str]:
    yield "## Reward against length"
    yield ""
    yield (
        f"reward = a log(length) + b, without the length penalty; {found.by_rollout.points:,} "
        f"completions of {found.prompts:,} prompts in {len(found.steps)} steps of {found.run}."
    )
    yield ""
    fits = {"by completion": found.by_rollout, "by step": found.by_step}
    rows = [_fit_row(name, fit) for name, fit in fits.items() if fit is not None]
    yield from _table(["fit", "a", "b", "R^2", "points", "degrees of freedom"], rows)
    yield ""
    if found.by_step is None:
        yield "No fit by step: it needs three steps whose mean lengths differ."
    elif abs(found.by_step.residual_autocorrelation or 0) > AUTOCORRELATED:
        yield (
            "Residuals of neighbouring steps are correlated "
            f"({found.by_step.residual_autocorrelation:.2f}): the errors of the fit by step are "
            "wrong, as they take steps for independent."
        )
    for reason, count in found.left_out.items():
        yield f"- left out: {count}, {reason}"


def _fit_row(name: str, fit: LineFit) -> list[str]:
    return [
        name,
        _with_error(fit.slope, fit.slope_se),
        _with_error(fit.intercept, fit.intercept_se),
        _maybe(fit.r_squared),
        str(fit.points),
        str(fit.degrees_of_freedom),
    ]


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} +- {error:.2g}"


def _maybe(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
