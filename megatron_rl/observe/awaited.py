"""What a run waits for while it shows nothing. Pure.

Used by the live view.
"""

from collections.abc import Sequence
from typing import Any

from megatron_rl.config.tree import Config

Row = dict[str, Any]


class Awaited:
    """Follows a run by its phases and rows, and says what must come next."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._phase = ""
        self._is_tuned = self._has_started = self._has_synced = self._has_rollouts = False
        self._since: dict[str, float] = {}
        """When each thing that is awaited now was first awaited."""

    def enter_phase(self, phase: str) -> None:
        """The run does something else now."""
        self._phase = phase
        self._is_tuned = False

    def note(self, row: Row) -> None:
        """Take in a row of the metrics."""
        self._is_tuned |= row["source"] in ("sft", "sft_baseline")
        self._has_started |= "model/parameters" in row
        self._has_synced |= row["source"] == "trainer" and "weight_sync/s" in row
        self._has_rollouts |= "activity/rollouts_scored" in row

    def text(self, starting: Sequence[str], running: Sequence[str], now: float) -> str:
        """What is awaited, and for how long already each.

        starting: names of the generators whose engine is not ready. running: all roles.
        """
        awaited = self._what(starting, running)
        self._since = {what: self._since.get(what, now) for what in awaited}
        return "; ".join(f"{what}: {now - self._since[what]:.0f} s so far" for what in awaited)

    def _what(self, starting: Sequence[str], running: Sequence[str]) -> list[str]:
        engines = []
        if starting:
            limit_s = self._config.generator.start_timeout_s
            verb = "starts its engine" if len(starting) == 1 else "start their engines"
            engines = [f"{', '.join(starting)} {verb} (at most {limit_s:.0f} s)"]
        if any(name.startswith("sft") for name in running):
            tuned = "supervised training runs" if self._is_tuned else "trainer ranks load the model"
            return [tuned, *engines]
        if engines:
            return engines
        if "trainer" in running and not self._has_started:
            return ["trainer ranks load the model and meet the generators"]
        if "trainer" in running and not self._has_synced:
            return ["the first weights travel to the generators"]
        if not self._has_rollouts:
            return ["the first completions are generated"]
        return [f"no news, {self._phase} continues"]
