"""PNG plots that compare settings, for `megatron-rl simulate --plots DIR`."""

import io
from collections.abc import Sequence

from megatron_rl.simulation.outcome import Outcome


def draw_all(names: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """File name -> PNG: parts of the trainer's step; idle shares and staleness."""
    from matplotlib.figure import Figure

    found: dict[str, bytes] = {}
    for file, ylabel in {"steps.png": "seconds of a step", "shares.png": "share"}.items():
        figure = Figure(figsize=(1.5 + max(4.0, 0.9 * len(names)), 4.2), layout="constrained")
        axes = figure.add_subplot(ylabel=ylabel)
        places = range(len(names))
        if file == "steps.png":
            bottom = [0.0] * len(names)
            for label, part in (("computes", "compute_s"), ("weight syncs", "stall_s"),
                                ("waits", "wait_s")):  # fmt: skip
                heights = [getattr(outcome, part) for outcome in outcomes]
                axes.bar(places, heights, bottom=bottom, label=label)
                bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        else:
            empty = [1 - outcome.slots_used for outcome in outcomes]
            axes.plot(places, [o.trainer_idle for o in outcomes], "o-", label="trainer idle")
            axes.plot(places, empty, "s-", label="empty engine slots")
            axes.set_ylim(0, 1)
            versions = axes.twinx()
            stale = [outcome.staleness_mean for outcome in outcomes]
            versions.plot(places, stale, "k^--", label="staleness, mean versions")
            versions.set(ylim=(0, None), ylabel="versions")
            versions.legend(loc="upper right")
        axes.set_xticks(places, names, rotation=30, ha="right")
        axes.legend(loc="upper left")
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=120)
        found[file] = png.getvalue()
    return found
