"""Draws an analysis as PNG files. Used by `megatron-rl analyse`; imports matplotlib to draw."""

import io
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.analysis.lengths import LengthsResult, LineFit, Means
from megatron_rl.analysis.results import PLANE, Analysis, PlaneResult, WeightsResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PATH, EXPLAINED, SURFACE, FIT = "path.png", "explained.png", "plane.png", "lengths.png"
_DPI = 120
_SHOWN_DIRECTIONS = 10
_LABEL = {"boxstyle": "round,pad=0.1", "facecolor": "white", "alpha": 0.6, "linewidth": 0}
_DOT_AREA = 20
"""Area in square points of a bin or step of mean size."""
_LABELLED = 12
"""Maximum number of labelled checkpoints."""


def draw_all(analysis: Analysis) -> dict[str, bytes]:
    """File name -> PNG for each section of the analysis."""
    drawn = {}
    if analysis.weights is not None:
        drawn[PATH] = draw_path(analysis.weights)
        drawn[EXPLAINED] = draw_explained(analysis.weights)
    if analysis.plane is not None:
        drawn[SURFACE] = draw_plane(analysis.plane, analysis.weights)
    if analysis.lengths is not None:
        drawn[FIT] = draw_lengths(analysis.lengths)
    return drawn


def draw_path(weights: WeightsResult) -> bytes:
    """Checkpoints in the plane of the first two directions, in order."""
    figure, (axes,) = _figure(1)
    _path(axes, weights)
    axes.set_xlabel(f"direction 1 ({weights.explained[0]:.1%})")
    second = weights.explained[1] if len(weights.explained) > 1 else 0.0
    axes.set_ylabel(f"direction 2 ({second:.1%})")
    axes.set_title("Checkpoints in weight space")
    return _png(figure)


def draw_explained(weights: WeightsResult) -> bytes:
    """Explained share of each direction, and of a random walk's."""
    figure, (axes,) = _figure(1)
    shares = np.array(weights.explained[:_SHOWN_DIRECTIONS])
    walk = np.array(weights.random_walk[:_SHOWN_DIRECTIONS])
    axes.bar(np.arange(len(shares)) + 1, shares, color="tab:blue", label="checkpoints")
    axes.plot(np.arange(len(walk)) + 1, walk, "o--", color="tab:gray", label="random walk")
    axes.set_xticks(np.arange(max(len(shares), len(walk))) + 1)
    axes.set_xlabel("direction")
    axes.set_ylabel("share of squared distances")
    axes.legend()
    axes.set_title("Explained variance")
    return _png(figure)


def draw_plane(plane: PlaneResult, weights: WeightsResult | None) -> bytes:
    """Reward and length over the plane; unevaluated points stay white."""
    figure, panels = _figure(2)
    fields = {"mean reward": "reward", "mean length, tokens": "length_tokens"}
    for axes, (title, name) in zip(panels, fields.items(), strict=True):
        values = np.full((len(plane.second), len(plane.first)), np.nan)
        for point in plane.points:
            values[point.row, point.column] = getattr(point.figures, name).value
        mesh = axes.pcolormesh(plane.first, plane.second, values, shading="nearest")
        figure.colorbar(mesh, ax=axes)
        if weights is not None:
            _path(axes, weights)
        axes.set_xlabel("direction 1")
        axes.set_ylabel("direction 2")
        axes.set_title(title)
    return _png(figure)


def draw_lengths(lengths: LengthsResult) -> bytes:
    """Reward against length: bins of length, and steps."""
    figure, (left, right) = _figure(2)
    _fitted(left, lengths.bins, lengths.by_rollout, "by length of completion")
    _fitted(right, lengths.steps, lengths.by_step, "by step")
    return _png(figure)


def _fitted(axes: "Axes", means: list[Means], fit: LineFit | None, title: str) -> None:
    tokens = np.array([one.length_tokens for one in means])
    axes.set_xscale("log")
    completions = np.array([one.completions for one in means])
    # The area of a dot is proportional to its completions.
    areas = np.maximum(_DOT_AREA * completions / completions.mean(), 4)
    axes.scatter(tokens, [one.reward for one in means], s=areas)
    if fit is not None and tokens.min() < tokens.max():
        line = np.geomspace(tokens.min(), tokens.max(), 50)
        label = f"{fit.slope:.3g} log(length) {fit.intercept:+.3g}"
        axes.plot(
            line, fit.slope * np.log(line) + fit.intercept, "-", color="tab:orange", label=label
        )
        axes.legend()
    for labels in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        labels("{x:g}")
    axes.tick_params(axis="x", which="both", labelrotation=45)
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("reward without length penalty")
    axes.set_title(title)


def _path(axes: "Axes", weights: WeightsResult) -> None:
    places = np.zeros((len(weights.checkpoints), PLANE))
    for place, one in zip(places, weights.checkpoints, strict=True):
        place[: len(one.coordinates)] = one.coordinates[:PLANE]
    style = {"color": "black", "markerfacecolor": "white", "markersize": 5, "linewidth": 1}
    axes.plot(places[:, 0], places[:, 1], "o-", **style)
    axes.margins(0.15)
    every = -(-len(places) // _LABELLED)
    for number, one in enumerate(weights.checkpoints):
        if number % every == 0 or number == len(places) - 1:
            axes.annotate(one.name, places[number], fontsize=7, xytext=(3, 3),
                          textcoords="offset points", bbox=_LABEL)  # fmt: skip


def _figure(panels: int) -> "tuple[Figure, list[Axes]]":
    """A figure with a row of axes; not from pyplot, which keeps figures and needs a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * panels, 4.5), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
