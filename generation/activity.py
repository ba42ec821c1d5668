"""How long a generator had work, for its heartbeat.

Used by the generator process. Pure: the caller supplies the time.
"""

from megatron_rl.protocol.generator_messages import EngineActivity


class Activity:
    """Counts completions in flight, seconds idle and busy, and tokens, since the start."""

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

    def report(self, now: float) -> EngineActivity:
        """All figures until now."""
        self._settle(now)
        return EngineActivity(self._idle_s, self._busy_s, self._tokens, self.running)

    def _settle(self, now: float) -> None:
        if self._since is None:
            return
        if self.running:
            self._busy_s += now - self._since
        else:
            self._idle_s += now - self._since
        self._since = now
