"""Decides which train prompts are drawn: retires solved ones, admits harder bands. Pure.

Used by the rollout queue. A checkpoint has the statistics as of the last batch. A resumed run
generates the groups dropped since that batch again, and counts them then, so no group counts twice.
"""

import collections
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import CurriculumConfig
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.queue_state import CurriculumState, PromptVisits
from megatron_rl.protocol.types import Prompt

log = logging.getLogger(__name__)

_ALWAYS, _NEVER = -1, -2
"""Band numbers of prompts without a pass rate, and of prompts below the last band."""
_UNVISITED = PromptVisits(visits=0, solved=0, is_retired=False)


class Visit(NamedTuple):
    """The verdicts on one group."""

    prompt_id: str
    right: int
    graded: int
    """Completions with a score."""
    size: int
    """Completions of the group."""


class Curriculum:
    """Statistics of each prompt, which decide whether it is drawn."""

    def __init__(self, config: CurriculumConfig, sets: PromptSets) -> None:
        """Raises InputError for bands when no prompt has a pass rate."""
        self._config = config
        self._sets = sets
        self._source_of = {p.id: n for n, prompts in enumerate(sets.train) for p in prompts}
        self._band_of = {
            p.id: _band(p.pass_rate, config.bands) for prompts in sets.train for p in prompts
        }
        self._visits: dict[str, PromptVisits] = {}
        self._window: collections.deque[tuple[int, int]]
        self._window = collections.deque(maxlen=config.window_visits)
        self._admitted = 1
        self._readmitted = 0
        self._counts = self._count_active()
        self._committed = self._current()
        bands = self._band_of.values()
        if config.bands and bands and all(band == _ALWAYS for band in bands):
            raise InputError(
                f"curriculum.bands={config.bands} go by the pass rates of prompts, and no train "
                'prompt has one: add "pass_rate" to its line, or set curriculum.bands=[]'
            )
        never = sum(band == _NEVER for band in bands)
        if never:
            log.info("%d prompts are below curriculum.bands=%s: never drawn", never, config.bands)

    # --- drawing --------------------------------------------------------------------------------

    def __call__(self, prompt: Prompt) -> bool:
        known = self._visits.get(prompt.id, _UNVISITED)
        return self._is_admitted(prompt.id) and not known.is_retired

    def count(self, source: int) -> int:
        """Number of prompts of a source that may be drawn now."""
        return self._counts[source]

    def make_room(self, weights: Sequence[float]) -> None:
        """Ensure that the sources with a weight have a prompt to draw.

        If there is none, admit the next band. After the last band, draw retired prompts again with
        new statistics.
        """
        while not self._has_room(weights) and self._admitted < len(self._config.bands):
            self._admit("no admitted prompt is left")
        if self._has_room(weights):
            return
        again = [
            prompt_id
            for prompt_id, known in self._visits.items()
            if known.is_retired and weights[self._source_of[prompt_id]]
        ]
        for prompt_id in again:
            known = self._visits[prompt_id]
            self._visits[prompt_id] = PromptVisits(known.visits, solved=0, is_retired=False)
        self._readmitted += len(again)
        self._counts = self._count_active()
        log.warning(
            "all prompts are retired (curriculum.retire_after): %d are drawn again", len(again)
        )

    def _has_room(self, weights: Sequence[float]) -> bool:
        return any(w and count for w, count in zip(weights, self._counts, strict=True))

    def _is_admitted(self, prompt_id: str) -> bool:
        band = self._band_of[prompt_id]
        return band != _NEVER and band < self._admitted

    def _count_active(self) -> list[int]:
        return [sum(map(self, prompts)) for prompts in self._sets.train]

    # --- learning -------------------------------------------------------------------------------

    def note(self, visits: Iterable[Visit]) -> None:
        """Count groups that are trained on or dropped."""
        for visit in visits:
            if visit.graded:
                self._note(visit)
                self._look_at_band(visit)

    def _note(self, visit: Visit) -> None:
        known = self._visits.get(visit.prompt_id, _UNVISITED)
        # A completion without a score is not right.
        solved = known.solved + 1 if visit.right == visit.size else 0
        # A prompt stays retired when groups that were open before end later.
        is_done = known.is_retired or 0 < self._config.retire_after <= solved
        if is_done and not known.is_retired and self._is_admitted(visit.prompt_id):
            self._counts[self._source_of[visit.prompt_id]] -= 1
        self._visits[visit.prompt_id] = PromptVisits(known.visits + 1, solved, is_done)

    def _look_at_band(self, visit: Visit) -> None:
        if self._admitted >= len(self._config.bands):
            return
        self._window.append((visit.right, visit.graded))
        right, graded = (sum(counts) for counts in zip(*self._window, strict=True))
        if len(self._window) == self._window.maxlen and right >= self._config.admit_at * graded:
            self._admit(f"{right} of {graded} completions were right")

    def _admit(self, why: str) -> None:
        self._admitted += 1
        self._window.clear()
        self._counts = self._count_active()
        edge = self._config.bands[self._admitted - 1]
        log.info("%s: prompts with a pass rate from %g on are drawn", why, edge)

    # --- state ----------------------------------------------------------------------------------

    def metrics(self) -> list[Metric]:
        retired = sum(known.is_retired for known in self._visits.values())
        counts = {
            "prompts_active": sum(self._counts),
            "prompts_retired": retired,
            "prompts_admitted": sum(map(self._is_admitted, self._band_of)),
            "prompts_readmitted": self._readmitted,
        }
        if self._config.bands:
            counts["bands_admitted"] = self._admitted
        return [Metric(f"curriculum/{name}", count, "max") for name, count in counts.items()]

    def commit(self) -> None:
        """A batch counts all noted groups: checkpoints have these statistics from now on."""
        self._committed = self._current()

    def state(self) -> CurriculumState:
        """The statistics as of the last `commit`."""
        return self._committed

    def _current(self) -> CurriculumState:
        return CurriculumState(
            self._admitted, list(self._window), dict(self._visits), self._readmitted
        )

    def restore(self, state: CurriculumState) -> None:
        """Restore the state. Raises InputError when the run has other prompts."""
        unknown = sorted(state.prompts.keys() - self._band_of.keys())
        if unknown:
            raise InputError(
                f"the saved curriculum names the prompt {unknown[0]!r}, which the prompt sources "
                "lack: resume with the prompts of the saved run"
            )
        self._visits = dict(state.prompts)
        self._window.extend(state.window)
        self._admitted = min(state.admitted_bands, max(1, len(self._config.bands)))
        self._readmitted = state.readmitted
        self._counts = self._count_active()
        self._committed = state


def _band(pass_rate: float | None, bands: Sequence[float]) -> int:
    if pass_rate is None or not bands:
        return _ALWAYS
    return next((number for number, edge in enumerate(bands) if edge <= pass_rate), _NEVER)
