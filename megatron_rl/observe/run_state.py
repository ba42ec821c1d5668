"""State of a run from its metric rows, and plain lines about rows. Pure.

Used by the live view and `megatron-rl status`.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Literal

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.observe.activity_text import ActivityTotals
from megatron_rl.observe.choice import accuracy_text, prompts_text
from megatron_rl.observe.deaths import how_it_ended
from megatron_rl.observe.metrics_table import find
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DONE,
    COMPLETIONS_WANTED,
    EVALUATION_RUNNING,
    GROUPS_DROPPED,
    NODES,
    RESUMED,
    Row,
)
from megatron_rl.rollout_queue.peer_rows import (
    GENERATORS,
    GENERATORS_WANTED,
    MISSING,
    REPORTING,
    VERIFIERS,
    VERIFIERS_WANTED,
    conversations_text,
    generators_text,
)
from megatron_rl.rollout_queue.waits import WAITS, Wait, read_waits

Kind = Literal["evaluation", "restart", "node", "activity", "step", "sft step", "other"]
RECENT = 10
"""Steps used for speed and warnings."""
KEPT_STEPS = 12
_LARGE_GAP_NATS = 0.05
_MANY_ZERO_VARIANCE = 2.0
"""Zero-variance groups for each trained group."""
_BAR_COLUMNS = 30
COLUMNS = (
    # heading, metric, format
    ("reward", "rollout/reward", ".3f"),
    ("correct", "rollout/correct", ".3f"),
    ("length", "rollout/length_tokens", ".1f"),
    ("stale max", "queue/staleness_versions_max", ".0f"),
    ("gap", "train/logprob_gap", ".4f"),
    ("trainer tok/s", "train/tokens_per_s", ".0f"),
    ("update s", "train/update_s", ".2f"),
    ("weight sync s", "weight_sync/s", ".2f"),
    ("waited s", "wait/batch_s", ".2f"),
)
"""Columns of a step."""
GAP_NOTE = "gap -: no token of the step was sampled under the current policy version"


class RunState:
    """State of a run after its rows so far."""

    def __init__(self) -> None:
        self.steps: deque[Row] = deque(maxlen=KEPT_STEPS)
        """The latest steps of the trainer, oldest first."""
        self.activity = ActivityTotals()
        """Totals since the last step or evaluation."""
        self.evaluation = EvaluationProgress()
        self.peers = Peers()
        self.nodes = ""
        """Number of nodes, and the latest change; "" before the first one."""
        self.generators = ""
        """Text about busy generators; "" before the first row about them."""
        self.conversations = ""
        """Text about open conversations with environments, at the last row about generators."""
        self.waits: list[Wait] = []
        """What each process does or waits for, as the queue saw it last."""
        self.heard: dict[str, float] = {}
        """Unix seconds of the last row, by role."""

    def begin_again(self) -> None:
        """Forget what the processes of the start before did: the next rows are of others."""
        self.evaluation, self.peers, self.heard = EvaluationProgress(), Peers(), {}
        self.nodes, self.generators, self.conversations, self.waits = "", "", "", []

    def take(self, row: Row) -> Kind:
        """Take in a row; returns its kind."""
        if RESUMED in row:
            self.begin_again()
        self.heard[row["source"]] = row["time"]
        self.evaluation.note(row)
        self.peers.note(row)
        self.generators = generators_text(row) or self.generators
        if REPORTING in row:
            self.conversations = conversations_text(row)
        self.waits = read_waits(row) if WAITS in row else self.waits
        if "eval/n" in row:
            self.activity = self.activity.after_evaluation()
            return "evaluation"
        if "max_restarts" in row:
            return "restart"
        if "node_event" in row:
            self.nodes = f"nodes {row[NODES]}; {row['node_event']}"
            return "node"
        if self.activity.take(row):
            return "activity"
        if "train/loss" not in row:
            return "other"
        if row["source"] != "trainer":
            return "sft step"
        self.steps.append(row)
        self.activity = self.activity.next_part()
        return "step"


class EvaluationProgress:
    """Progress of the current evaluation, from rows of the queue."""

    def __init__(self) -> None:
        self._first: Row | None = None
        """First row of the current evaluation with all its sets."""
        self._last: Row | None = None

    def note(self, row: Row) -> None:
        if EVALUATION_RUNNING in row:
            if self._first is None or _base(self._first) != _base(row):
                self._first = row
            self._last = row
        elif "eval/n" in row or "activity/seconds" in row:
            # A set has ended, or the queue works without an evaluation.
            self._last = None

    def text(self) -> str:
        """One line about the current evaluation; "" without one."""
        if self._last is None:
            return ""
        done, wanted = self._last[COMPLETIONS_DONE], self._last[COMPLETIONS_WANTED]
        label = self._last[EVALUATION_RUNNING]
        text = f"evaluation {label}: {done:,} of {wanted:,} completions scored"
        left_s = self._left_s()
        return text if left_s is None else f"{text}, about {duration_text(left_s)} left"

    def bar(self) -> Table:
        assert self._last is not None
        table = Table.grid(padding=(0, 1))
        bar = ProgressBar(
            self._last[COMPLETIONS_WANTED], self._last[COMPLETIONS_DONE], width=_BAR_COLUMNS
        )
        table.add_row(bar, Text(self.text()))
        return table

    def _left_s(self) -> float | None:
        """Remaining seconds at the speed so far; None before the first completions."""
        assert self._first is not None and self._last is not None
        done = self._last[COMPLETIONS_DONE]
        made = done - self._first[COMPLETIONS_DONE]
        seconds: float = self._last["time"] - self._first["time"]
        left: int = self._last[COMPLETIONS_WANTED] - done
        return seconds * left / made if made > 0 and seconds > 0 else None


def _base(row: Row) -> str:
    """Label of an evaluation without its set."""
    label: str = row[EVALUATION_RUNNING]
    return label.partition(".")[0]


class Peers:
    """Engines and verifiers that the queue hears, from rows of `rollout_queue/presence.py`."""

    def __init__(self) -> None:
        self._counts = ""
        self.missing: dict[str, float] = {}
        """Silent or ended process -> unix seconds of the queue's first row about it."""
        self.newly_missing: list[str] = []
        """Processes that the last row added to `missing`."""

    def note(self, row: Row) -> None:
        self.newly_missing = []
        if GENERATORS not in row:
            return
        known = self.missing
        self.missing = {name: known.get(name, row["time"]) for name in row[MISSING].split()}
        self.newly_missing = [name for name in self.missing if name not in known]
        self._counts = (
            f"engines {row[GENERATORS]} of {row[GENERATORS_WANTED]}, "
            f"verifiers {row[VERIFIERS]} of {row[VERIFIERS_WANTED]}"
        )

    def text(self) -> str:
        """Numbers of live processes and names of missing ones; "" before the first row."""
        missing = f" (missing: {', '.join(self.missing)})" if self.missing else ""
        return self._counts + missing

    def missing_line(self, name: str) -> str:
        """A warning about a newly missing process."""
        return (
            f"warning: the queue no longer hears {name} and gives its work to others; "
            f"{self._counts}: see logs/{name}*"
        )


def waits_text(waits: Sequence[Wait], now: float) -> str:
    """What each process does or waits for, and for how long; "" while nothing is known.

    Of generators and verifiers that do the same, the one without progress for longest stands first.
    now: unix seconds.
    """
    alike: dict[tuple[str, str], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since_s):
        alike.setdefault((wait.role.partition("-")[0], wait.what), []).append(wait)
    texts = []
    for (_, what), (first, *others) in alike.items():
        like_it = f", {len(others)} more likewise" if others else ""
        texts.append(f"{first.role} {what}: {duration_text(now - first.since_s)}{like_it}")
    return "; ".join(texts)


def step_seconds(steps: Sequence[Row]) -> float | None:
    """Median seconds per recent step; None with fewer than two steps."""
    times = [row["time"] for row in steps][-RECENT - 1 :]
    if len(times) < 2:
        return None
    return statistics.median(late - early for early, late in zip(times, times[1:], strict=False))


def warnings_of(steps: Sequence[Row], config: Config) -> dict[str, str]:
    """Warning text by metric, for metrics beyond their limits in recent steps.

    steps: rows of the trainer, oldest first.
    """
    steps = list(steps)[-RECENT:]
    if not steps:
        return {}

    def median(name: str) -> float:
        return statistics.median([row.get(name, 0.0) for row in steps])

    def total(name: str) -> float:
        return sum(row.get(name, 0) for row in steps)

    dropped = f"{GROUPS_DROPPED}zero_variance"
    staleness, gap = "queue/staleness_versions_mean", "train/logprob_gap"
    allowed = max(stage.queue.max_staleness for stage in resolve_stages(config))
    checks = (
        (staleness, median(staleness), float(allowed)),
        (gap, median(gap), _LARGE_GAP_NATS),
        (dropped, total(dropped), _MANY_ZERO_VARIANCE * total("queue/groups_trained")),
        ("train/skipped_steps", total("train/skipped_steps"), 0.0),
    )
    found = {}
    for name, value, limit in checks:
        documented = find(name)
        if value > limit and documented is not None:
            found[name] = (
                f"{name} is {value:.4g} in the latest {len(steps)} steps, above {limit:.4g}: "
                f"{documented[0].fix}"
            )
    return found


def duration_text(seconds: float) -> str:
    """Hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def lacks_gap(step: Row) -> bool:
    """Whether a step could not measure the logprob gap."""
    return "train/logprob_gap" not in step


def step_line(row: Row, total: int) -> str:
    cells = [f"{heading} {cell(row, name, form)}" for heading, name, form in COLUMNS]
    return f"step {row['step']}/{total}: " + "  ".join(cells)


def sft_line(row: Row) -> str:
    """One plain line about a step of supervised fine-tuning."""
    return (
        f"{row['source']} step {row['step']}: loss {cell(row, 'train/loss', '.4f')}  "
        f"lr {cell(row, 'train/lr', '.2e')}  tok/s {cell(row, 'train/tokens_per_s', '.0f')}"
    )


def evaluation_line(row: Row) -> str:
    lost = row.get("eval/not_graded", 0)
    ungraded = f", {lost} completions could not be graded" if lost else ""
    if "eval/accuracy" not in row:
        return f"evaluation {row['label']}: not measured{ungraded}"
    # Labels of evaluation sets are WHEN.SET.
    what = prompts_text(row["eval/n"], is_held_out="." not in row["label"])
    accuracy = accuracy_text(row["eval/accuracy"], row.get("eval/accuracy_se"))
    rewarded = f", mean reward {row['eval/reward']:.3f}" if "eval/reward" in row else ""
    return (
        f"evaluation {row['label']}: accuracy {accuracy} on {what}, "
        f"format {cell(row, 'eval/format', '.3f')}, "
        f"length {cell(row, 'eval/length_tokens', '.1f')}{rewarded}{ungraded}"
    )


def restart_line(row: Row) -> str:
    """A warning about a restarted process."""
    when = f"after step {row['step']}" if row["step"] >= 0 else "before the first step"
    why = f" ({row['why']})" if row.get("why") else ""
    return (
        f"warning: {row['role']} ended with {how_it_ended(row['exit_code'])} {when}{why}; "
        f"restart {row['restart']} of {row['max_restarts']}"
    )


def cell(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if name in row else "-"
