"""Sums of the queue's activity rows, and text about them. Pure.

Used by the live view and the summary; `rollout_queue/activity.py` writes the rows.
"""

from collections import Counter
from collections.abc import Iterable

from megatron_rl.protocol.metrics import Row
from megatron_rl.rollout_queue.activity import DIAGNOSIS, PREFIX
from megatron_rl.rollout_queue.diagnosis import reasons_text


class ActivityTotals:
    """Sums over activity rows."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._sums: Counter[str] = Counter()
        self.in_flight = 0
        """Completions in flight at the last row."""
        self.diagnosis = ""
        """The latest likely fault; "" while there is none."""
        for row in rows:
            self.take(row)

    def take(self, row: Row) -> bool:
        """Add a row; False for a row of another kind."""
        counts = {
            name.removeprefix(PREFIX): v for name, v in row.items() if name.startswith(PREFIX)
        }
        if not counts:
            return False
        self.in_flight = counts.pop("completions_in_flight", 0)
        self.diagnosis = counts.pop(DIAGNOSIS.removeprefix(PREFIX), self.diagnosis)
        self._sums.update(counts)
        return True

    def after_evaluation(self) -> "ActivityTotals":
        """Empty totals after an evaluation; self if training continued during it."""
        is_alone = self.count("rollouts_for_evaluation") == self.count("rollouts_scored")
        return self.next_part() if is_alone else self

    def next_part(self) -> "ActivityTotals":
        """Empty totals that keep the likely fault."""
        found = ActivityTotals()
        found.diagnosis = self.diagnosis
        return found

    def counts(self) -> dict[str, int]:
        """All sums by name without the prefix, for `of_counts`."""
        return {name: int(value) for name, value in self._sums.items() if name != "seconds"}

    @classmethod
    def of_counts(cls, counts: dict[str, int]) -> "ActivityTotals":
        """Totals with these sums."""
        return cls([{PREFIX + name: value for name, value in counts.items()}])

    def count(self, name: str) -> int:
        """Sum of one value by its name without the prefix."""
        return int(self._sums[name])

    def by_reason(self, area: str) -> Counter[str]:
        """Counts by reason; area: reason, format_failures, groups_dropped or another."""
        start = f"{area}/"
        return Counter(
            {
                name.removeprefix(start): int(count)
                for name, count in self._sums.items()
                if name.startswith(start) and count
            }
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Completion tokens per second; None without a known time."""
        seconds = self._sums["seconds"]
        return self._sums["tokens"] / seconds if seconds else None


def rollouts_text(totals: ActivityTotals) -> str:
    """Numbers of generated and scored rollouts, and their verdicts."""
    verdicts, format_failures = totals.by_reason("reason"), totals.by_reason("format_failures")
    correct = verdicts.pop("correct", 0)
    evaluated = totals.count("rollouts_for_evaluation")
    parts = [f"{correct} correct"]
    if verdicts:
        parts.append(f"{verdicts.total()} not ({reasons_text(verdicts)})")
    if format_failures:
        parts.append(f"{format_failures.total()} format failures ({reasons_text(format_failures)})")
    failed = totals.by_reason("attempts_failed")
    if failed:
        parts.append(f"{failed.total()} failed attempts ({reasons_text(failed)})")
    ungraded = totals.by_reason("completions_dropped")
    if ungraded:
        parts.append(f"{ungraded.total()} dropped without a grade ({reasons_text(ungraded)})")
    purpose = f" ({evaluated} for evaluations)" if evaluated else ""
    generated, scored = totals.count("rollouts_generated"), totals.count("rollouts_scored")
    return f"{generated} generated, {scored} scored{purpose}: {', '.join(parts)}"


def groups_text(totals: ActivityTotals) -> str:
    """Numbers of complete and dropped training groups, with reasons."""
    dropped = totals.by_reason("groups_dropped")
    text = f"{totals.count('groups_complete')} groups complete"
    return f"{text}, dropped: {reasons_text(dropped)}" if dropped else text


def activity_line(totals: ActivityTotals) -> str:
    """One line about rollouts, groups, speed and completions in flight."""
    parts = [f"rollouts: {rollouts_text(totals)}"]
    if totals.count("groups_complete") or totals.by_reason("groups_dropped"):
        parts.append(groups_text(totals))
    if totals.tokens_per_s is not None:
        parts.append(f"{totals.tokens_per_s:,.0f} generated tok/s")
    return "; ".join([*parts, f"{totals.in_flight} in flight"])
