"""Metrics rows about what all generators do; the names of those about peers (`presence.py`).

Used by the rollout queue, which gets the figures with each heartbeat. docs/metrics.md explains the
values (`generator/*`, `peers/*`). One row is about all generators, so the metrics file of a run
grows only with time. A row of peers is written when it changes; the launcher and `status` read it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.protocol.generator_messages import EngineActivity

REPORTING, TOKENS = "generator/reporting", "generator/tokens"
SLOWEST, SLOWEST_TOKENS_PER_S = "generator/slowest", "generator/busy_tokens_per_s_min"
GENERATORS, GENERATORS_WANTED = "peers/generators", "peers/generators_wanted"
VERIFIERS, VERIFIERS_WANTED = "peers/verifiers", "peers/verifiers_wanted"
MISSING = "peers/missing"
TURNS, CONVERSATIONS = "generator/turns", "generator/conversations"
IN_ENVIRONMENT = "generator/conversations_in_environment"
UNFINISHED, UNFINISHED_S = "generator/longest_unfinished", "generator/unfinished_s_max"
_ROW_S, _LATE_ROW_S = 5.0, 60.0
_LATE_S = 600.0

Row = dict[str, float | int | str]


@dataclass
class _Generator:
    session: int
    finished_at: float
    """When it last finished a completion or had no work."""
    last: EngineActivity = field(default_factory=EngineActivity)
    told: EngineActivity = field(default_factory=EngineActivity)
    """Its figures at the last row."""


class GeneratorRows:
    """Sums the figures of all generators and gives a row when one is due. Pure."""

    def __init__(self) -> None:
        self._generators: dict[str, _Generator] = {}
        self._began_at: float | None = None
        self._row_at = 0.0

    def note(self, name: str, session: int, activity: EngineActivity, now: float) -> None:
        """Note a heartbeat. Its figures are sums, so a lost heartbeat loses nothing."""
        if self._began_at is None:
            self._began_at, self._row_at = now, now
        known = self._generators.get(name)
        if known is None or known.session != session:
            known = self._generators[name] = _Generator(session, now)
        if activity.tokens > known.last.tokens or not activity.running:
            known.finished_at = now
        known.last = activity

    def take_row(self, alive: Iterable[str], now: float, *, is_last: bool = False) -> Row | None:
        """Figures since the last row; None when no row is due. alive: live generators."""
        if self._began_at is None:
            return None
        interval_s = _ROW_S if now - self._began_at < _LATE_S else _LATE_ROW_S
        if now - self._row_at < interval_s and not is_last:
            return None
        self._row_at = now
        row = _summed({name: _since_row(one) for name, one in self._generators.items()})
        if row:
            row |= self._longest_unfinished(set(alive), now)
        for one in self._generators.values():
            one.told = one.last
        return row or None

    def _longest_unfinished(self, alive: set[str], now: float) -> Row:
        working = [
            (one.finished_at, name)
            for name, one in self._generators.items()
            if one.last.running and name in alive
        ]
        if not working:
            return {UNFINISHED_S: 0.0}
        since, name = min(working)
        return {UNFINISHED_S: round(now - since, 1), UNFINISHED: name}


def _since_row(one: _Generator) -> EngineActivity:
    last, told = one.last, one.told
    return EngineActivity(
        last.idle_s - told.idle_s, last.busy_s - told.busy_s, last.tokens - told.tokens,
        last.running, last.turns - told.turns, last.conversations, last.in_environment,
    )  # fmt: skip


def _summed(found: dict[str, EngineActivity]) -> Row:
    """Sums and extremes over generators; {} if none had weights."""
    counted = {name: one for name, one in found.items() if one.idle_s + one.busy_s > 0}
    if not counted:
        return {}
    ones = counted.values()
    row: Row = {
        "generator/busy_s": round(sum(one.busy_s for one in ones), 3),
        "generator/idle_s": round(sum(one.idle_s for one in ones), 3),
        TOKENS: sum(one.tokens for one in ones),
        "generator/running": sum(one.running for one in ones),
        "generator/running_max": max(one.running for one in ones),
        REPORTING: len(counted),
        "generator/idle_share_max": round(
            max(one.idle_s / (one.idle_s + one.busy_s) for one in ones), 3
        ),
    }
    speeds = [(one.tokens / one.busy_s, name) for name, one in counted.items() if one.busy_s]
    if speeds:
        speed, name = min(speeds)
        row |= {SLOWEST_TOKENS_PER_S: round(speed, 1), SLOWEST: name}
    if any(one.turns or one.conversations for one in ones):
        row |= {
            TURNS: sum(one.turns for one in ones),
            CONVERSATIONS: sum(one.conversations for one in ones),
            IN_ENVIRONMENT: sum(one.in_environment for one in ones),
        }
    return row


def generators_text(row: Row) -> str:
    """One line for people about a row of generators; "" for another row."""
    if REPORTING not in row:
        return ""
    parts = [f"{row[REPORTING]} generators, {row['generator/running']} completions in flight"]
    if SLOWEST in row:
        parts.append(f"slowest {row[SLOWEST]} ({row[SLOWEST_TOKENS_PER_S]:,.0f} tok/s)")
    if UNFINISHED in row:
        parts.append(f"{row[UNFINISHED]} has finished nothing for {row[UNFINISHED_S]:.0f} s")
    return "; ".join(filter(None, [", ".join(parts), conversations_text(row)]))


def conversations_text(row: Row) -> str:
    """Open conversations and speed, from a row of generators; "" without conversations."""
    if CONVERSATIONS not in row:
        return ""
    total, waiting = int(row[CONVERSATIONS]), int(row[IN_ENVIRONMENT])
    text = (
        f"conversations open: {total} "
        f"(waiting for the environment {waiting}, for the engine {total - waiting})"
    )
    # Each generator is idle or busy at any time. Two heartbeats may be less than 1 ms apart.
    generator_s = float(row["generator/busy_s"]) + float(row["generator/idle_s"])
    if not generator_s:
        return text
    per_minute = 60 * int(row[TURNS]) * int(row[REPORTING]) / generator_s
    return f"{text}, turns a minute: {per_minute:,.0f}"
