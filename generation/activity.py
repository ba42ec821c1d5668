"""How long a generator had work, for its metrics.

Used by the generator process. Pure: the caller supplies the time.
"""

from megatron_rl.protocol.metrics import Metric

_METRICS_S, _LATE_METRICS_S = 5.0, 60.0
_LATE_S = 600.0


class Activity:
    """Counts completions in flight, seconds idle and busy, and tokens, between two reports."""

    def __init__(self) -> None:
        self.running = 0
        """Completions in flight."""
        self._since: float | None = None
        self._idle_s = 0.0
        self._busy_s = 0.0
        self._tokens = 0

    def start(self, now: float) -> None:
        """Begin to count: from here on the engine could serve."""
        if self._since is None:
            self._since = now

    def change(self, now: float, completions: int, tokens: int = 0) -> None:
        """Note that `completions` more (or fewer) are in flight, and tokens that were finished."""
        self._settle(now)
        self.running += completions
        self._tokens += tokens

    def report(self, now: float) -> list[Metric]:
        """Metrics since the last report."""
        self._settle(now)
        metrics = [
            Metric("generator/idle_s", self._idle_s, "sum"),
            Metric("generator/busy_s", self._busy_s, "sum"),
            Metric("generator/tokens", self._tokens, "sum"),
            Metric("generator/running", self.running, "max"),
        ]
        self._idle_s = self._busy_s = 0.0
        self._tokens = 0
        return metrics

    def _settle(self, now: float) -> None:
        if self._since is None:
            return
        if self.running:
            self._busy_s += now - self._since
        else:
            self._idle_s += now - self._since
        self._since = now


def metrics_interval_s(age_s: float) -> float:
    """Seconds from one row of metrics to the next, of a generator that runs for so long.

    All generators of a run write to one file, for weeks.
    """
    return _METRICS_S if age_s < _LATE_S else _LATE_METRICS_S
