"""The plots of a report, as plotly figures; plots without data are left out."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.colors import qualitative

from megatron_rl.observe.report.material import GIVEN, WAITED, Row, Run
from megatron_rl.protocol.metrics import GROUPS_DROPPED

COLOURS = qualitative.D3
BAND = 1.96
"""Standard errors of a 95 % band."""
_HEIGHT = 320
_BINS = 60


class Plot(NamedTuple):
    """A figure with its heading and explanation."""

    title: str
    explained: str
    figure: go.Figure


_CURVES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Reward", "Mean of all rollouts of a step, and its parts.",
     {"rollout/reward": "reward", "reward/correct": "for right answers",
      "reward/format": "for form", "reward/length": "length", "reward/language": "language"}),
    ("Right, format passed, cut", "Shares of all rollouts of a step, zero-variance groups too.",
     {"rollout/correct": "right", "rollout/format": "well-formed",
      "rollout/truncated": "cut at the length limit"}),
    ("Length of completions", "Mean, in tokens.", {"rollout/length_tokens": "tokens"}),
    ("Turns of conversations", "Mean replies of a conversation with an environment.",
     {"environment/turns": "turns"}),
    ("Shares of environments", "Of trained conversations: tokens that the environment or the chat "
     "template gave, and time between lease and return in which they waited for the environment.",
     {GIVEN: "tokens given", WAITED: "time waiting"}),
    ("Entropy", "Mean over tokens, in nats.", {"train/entropy_nats": "entropy"}),
    ("Logprob gap", "|trainer - generator| of tokens sampled under the current version, in nats.",
     {"train/logprob_gap": "mean", "train/mismatch_p99": "99th percentile"}),
    ("Clipped tokens", "Share of tokens from which clipping took the gradient.",
     {"train/clip_fraction_low": "below", "train/clip_fraction_high": "above"}),
    ("Gradient norm", "Before clipping.", {"train/grad_norm": "norm"}),
    ("Staleness", "Policy versions between sampling and training.",
     {"queue/staleness_versions_mean": "mean", "queue/staleness_versions_max": "largest"}),
    ("Throughput of the trainer", "Positions a second.", {"train/tokens_per_s": "positions"}),
    ("Stage", "Number of the stage of [[stages]].", {"queue/stage": "stage"}),
)  # fmt: skip

_SECONDS = {
    "wait/batch_s": "waits for a batch", "train/update_s": "update", "weight_sync/s": "weight sync",
}  # fmt: skip


def plots(runs: Sequence[Run]) -> list[Plot]:
    """All plots that have data, in the order of the report."""
    dropped, reasons = _named(runs, GROUPS_DROPPED), _named(runs, "reason/")
    made = [
        _accuracy(runs),
        *(_over_steps(runs, *one) for one in _CURVES),
        _staleness(runs),
        _lengths(runs),
        *(_over_steps(runs, *one, is_stacked=True) for one in (
            ("Seconds of a step", "Parts of a trainer step, stacked.", _SECONDS),
            ("Dropped groups",
             "Dropped groups of a step, by reason; zero-variance: all rewards are equal.", dropped),
            ("Verdicts", "Rollouts of a step by the reason of their score.", reasons),
        )),
    ]  # fmt: skip
    return [one for one in made if one is not None]


# Below the plot, because plotly's tool bar covers the top right.
LEGEND = {"orientation": "h", "y": -0.2, "yanchor": "top"}


def _styled(figure: go.Figure, x: str, *, is_stacked: bool = False) -> go.Figure:
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": 50, "r": 10, "t": 30, "b": 40},
        template="plotly_white",
        legend=LEGEND,
        barmode="stack" if is_stacked else "group",
    )
    figure.update_xaxes(title_text=x)
    return figure


def _name(run: Run, label: str, runs: Sequence[Run]) -> str:
    return f"{run.name}: {label}" if len(runs) > 1 else label


def _over_steps(
    runs: Sequence[Run], title: str, explained: str, labels: dict[str, str], *,
    is_stacked: bool = False,
) -> Plot | None:  # fmt: skip
    """Lines or stacked bars over steps; labels: by metric."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        for place, (metric, label) in enumerate(labels.items()):
            rows = [row for row in run.steps if (row.get(metric) if is_stacked else metric in row)]
            if not rows:
                continue
            colour = COLOURS[(number * len(labels) + place) % len(COLOURS)]
            x, y = [row["step"] for row in rows], [row[metric] for row in rows]
            name = _name(run, label, runs)
            if is_stacked:
                figure.add_bar(x=x, y=y, name=name, offsetgroup=number, marker={"color": colour})
            else:
                figure.add_scatter(x=x, y=y, name=name, mode="lines", line={"color": colour})
    if not figure.data:
        return None
    return Plot(title, explained, _styled(figure, "step", is_stacked=is_stacked))


def _accuracy(runs: Sequence[Run]) -> Plot | None:
    """Accuracies over policy versions, one line per set."""
    series = [(run, *found) for run in runs for found in _evaluations(run)]
    if not series:
        return None
    figure = go.Figure()
    for number, (run, name, rows) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        figure.add_scatter(
            x=[row["step"] for row in rows], y=[row["eval/accuracy"] for row in rows],
            error_y={"array": [_band(row) for row in rows]},
            text=[row["label"] for row in rows], name=_name(run, name, runs),
            mode="lines+markers", line={"color": colour},
        )  # fmt: skip
    text = f"Of held-out prompts and evaluation sets; bars are {BAND} standard errors either way."
    return Plot("Accuracy of evaluations", text, _styled(figure, "policy version"))


def _band(evaluation: Row) -> float | None:
    """Length of a bar; None for one problem, which has no error."""
    error = evaluation.get("eval/accuracy_se")
    return None if error is None else BAND * error


def _evaluations(run: Run) -> Iterator[tuple[str, list[Row]]]:
    """Rows by evaluation set, in order of versions; the SFT baseline counts as a set."""
    rows = [row for row in run.rows if "eval/accuracy" in row]
    names: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        when, _, name = row.get("label", "").partition(".")
        what = name or "held-out"
        names.setdefault(f"{what} (SFT baseline)" if when == "sft_baseline" else what, []).append(
            row
        )
    yield from names.items()


def _staleness(runs: Sequence[Run]) -> Plot | None:
    if not any(run.staleness for run in runs):
        return None
    figure = go.Figure()
    for run in runs:
        ages = sorted(run.staleness)
        figure.add_bar(x=ages, y=[run.staleness[age] for age in ages], name=run.name)
    figure.update_xaxes(dtick=1)
    text = "Trained rollouts, by versions between their oldest token and the step."
    return Plot("Staleness of rollouts", text, _styled(figure, "policy versions"))


def _lengths(runs: Sequence[Run]) -> Plot | None:
    if not any(run.lengths for run in runs):
        return None
    figure = go.Figure()
    for run in runs:
        figure.add_histogram(x=run.lengths, nbinsx=_BINS, name=run.name)
    return Plot("Lengths of completions", "Of all trained rollouts.", _styled(figure, "tokens"))


def _named(runs: Sequence[Run], prefix: str) -> dict[str, str]:
    """Metrics with a prefix, and their names without it."""
    names = {name for run in runs for row in run.steps for name in row}
    return {n: n.removeprefix(prefix) for n in sorted(names) if n.startswith(prefix)}
