"""Times of generation, grading, training and weight syncs: a plot, and a trace for Perfetto.

Sources are metrics.jsonl (the trainer's steps, the busy share of all generators, evaluations) and
recorded rollouts (leased, done, scored). Times are unix seconds.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import plotly.graph_objects as go

from megatron_rl.observe.report.figures import LEGEND, Plot
from megatron_rl.observe.report.material import Run
from megatron_rl.rollout_queue.peer_rows import REPORTING

TRAINER, VERIFIER, EVALUATIONS = "trainer", "verifier", "evaluations"
GENERATORS = "generators"
WAIT, UPDATE, WEIGHT_SYNC = "waits", "update", "weight sync"
_COLOURS = {WAIT: "#d8d8d8", UPDATE: "#1f77b4", WEIGHT_SYNC: "#d62728", "generates": "#2ca02c",
            "idle": "#f2f2f2", "evaluates": "#9467bd"}  # fmt: skip
_SHOWN_SPANS = 4_000
"""Most spans per kind in the plot; the trace has all spans."""


class Span(NamedTuple):
    """An activity of a role."""

    role: str
    what: str
    start: float
    end: float
    share: float = 1.0
    """Share of the span in which the role did so."""


def spans(run: Run) -> list[Span]:
    return [*_trainer(run), *_generators(run), *_evaluations(run)]


def _trainer(run: Run) -> Iterator[Span]:
    """A step's row is written at its end, after wait, update and sync."""
    for row in run.steps:
        sync, update = row.get("weight_sync/s", 0.0), row.get("train/update_s", 0.0)
        wait, end = row.get("wait/batch_s", 0.0), row["time"]
        edges = [end - sync - update - wait, end - sync - update, end - sync, end]
        for what, start, stop in zip(
            (WAIT, UPDATE, WEIGHT_SYNC), edges[:-1], edges[1:], strict=True
        ):
            if stop > start:
                yield Span(TRAINER, what, start, stop)


def _generators(run: Run) -> Iterator[Span]:
    for row in run.rows:
        busy, idle = row.get("generator/busy_s"), row.get("generator/idle_s")
        if busy is not None and idle is not None and busy + idle > 0:
            start = row["time"] - (busy + idle) / row.get(REPORTING, 1)
            yield Span(GENERATORS, "generates", start, row["time"], busy / (busy + idle))


def _evaluations(run: Run) -> Iterator[Span]:
    for row in run.rows:
        if row.get("eval/seconds"):
            yield Span(EVALUATIONS, row["label"], row["time"] - row["eval/seconds"], row["time"])


def plot(run: Run) -> Plot | None:
    """Bars over time, one line per role; None without spans."""
    found = spans(run)
    if not found:
        return None
    begin = min(span.start for span in found)
    figure = go.Figure()
    roles = sorted({span.role for span in found}, reverse=True)
    kinds = list(dict.fromkeys(_kind(span) for span in found))
    for kind in kinds:
        of_kind = [span for span in found if _kind(span) == kind]
        step = len(of_kind) // _SHOWN_SPANS + 1
        shown = of_kind[::step]
        figure.add_bar(
            y=[span.role for span in shown], x=[span.end - span.start for span in shown],
            base=[span.start - begin for span in shown], name=kind, orientation="h",
            marker={"color": _COLOURS[kind], "opacity": [max(0.1, s.share) for s in shown],
                    "line": {"width": 0}},
            text=[f"{span.what}, {span.share:.0%}" for span in shown], textposition="none",
            hovertemplate="%{y}: %{text}<br>%{x:.2f} s from %{base:.2f} s<extra></extra>",
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay", height=120 + 40 * len(roles), template="plotly_white",
        margin={"l": 90, "r": 10, "t": 30, "b": 40}, legend=LEGEND,
    )  # fmt: skip
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(categoryorder="array", categoryarray=roles)
    text = (
        "Generators are darker the more of the time they had completions to work on. "
        "`megatron-rl report RUN --trace FILE` writes all of it, and each rollout, for Perfetto."
    )
    return Plot(f"Who did what when: {run.name}", text, figure)


def _kind(span: Span) -> str:
    return "evaluates" if span.role == EVALUATIONS else span.what


def trace(run: Run) -> str:
    """Events in the format that ui.perfetto.dev and chrome://tracing open, in microseconds.

    Roles are threads; rollouts are asynchronous events, because they overlap.
    """
    events = [*_role_events(spans(run)), *_rollout_events(run)]
    begin = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round((event["ts"] - begin) * 1e6)
    roles = list(dict.fromkeys(event["tid"] for event in events))
    for event in events:
        event["tid"] = roles.index(event["tid"])
    names = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": role}}
        for number, role in enumerate(roles)
    ]
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def _role_events(found: list[Span]) -> Iterator[dict[str, Any]]:
    for span in found:
        length = round((span.end - span.start) * 1e6)
        common = {"name": span.what, "ph": "X", "pid": 0, "tid": span.role}
        yield common | {"ts": span.start, "dur": length, "args": {"share": round(span.share, 3)}}


def _rollout_events(run: Run) -> Iterator[dict[str, Any]]:
    for record in run.traced:
        times = record.times
        known = {"tokens": record.tokens, "reason": record.reason, "reward": record.reward}
        identity = f"{record.group}/{record.index}"
        for name, role, start, end in (
            ("generate", record.generator, times.leased, times.done),
            ("verify", VERIFIER, times.done, times.scored),
        ):
            if start and end:
                common = {"name": name, "cat": "rollout", "id": identity, "pid": 0, "tid": role}
                yield common | {"ph": "b", "ts": start, "args": known}
                yield common | {"ph": "e", "ts": end}
