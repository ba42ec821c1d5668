"""Plots of a comparison of settings as PNG.

Used by `megatron-rl simulate --plots DIR`, which alone loads matplotlib.
"""

import importlib.util
import io
from collections.abc import Sequence

from megatron_rl.config.errors import InputError
from megatron_rl.simulation.outcome import Outcome

STEPS, SHARES = "steps.png", "shares.png"
_DPI = 120


def check_library() -> None:
    """Raise InputError without matplotlib; loads nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "plots need matplotlib, which is not installed: install the version in "
            "requirements/cpu.txt, or leave --plots out"
        )


def draw_all(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """File name -> PNG: where the trainer's step goes, and idle shares beside staleness."""
    return {STEPS: _draw_steps(names, outcomes), SHARES: _draw_shares(names, outcomes)}


def _draw_steps(names: Sequence[str], outcomes: Sequence[Outcome]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + max(4.0, 0.9 * len(names)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    bottom = [0.0] * len(names)
    parts = {
        "computes": [outcome.compute_s for outcome in outcomes],
        "weight syncs": [outcome.stall_s for outcome in outcomes],
        "waits": [outcome.wait_s for outcome in outcomes],
    }
    for label, heights in parts.items():
        axes.bar(range(len(names)), heights, bottom=bottom, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("seconds of a step")
    return _finish(figure, axes, names)


def _draw_shares(names: Sequence[str], outcomes: Sequence[Outcome]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + max(4.0, 0.9 * len(names)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(names))
    axes.plot(places, [outcome.trainer_idle for outcome in outcomes], "o-", label="trainer idle")
    axes.plot(
        places, [1 - outcome.slots_used for outcome in outcomes], "s-", label="empty engine places"
    )
    axes.set_ylim(0, 1)
    axes.set_ylabel("share")
    versions = axes.twinx()
    versions.plot(
        places, [o.staleness_mean for o in outcomes], "k^--", label="staleness, mean versions"
    )
    versions.set_ylim(bottom=0)
    versions.set_ylabel("versions")
    versions.legend(loc="upper right")
    return _finish(figure, axes, names)


def _finish(figure, axes, names: Sequence[str]) -> bytes:  # noqa: ANN001 - matplotlib's
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.legend(loc="upper left")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI)
    return png.getvalue()
