"""How fast roles that share cores could compute at each moment of a run. Pure.

Used by calibration: seconds of a run, times this speed, are seconds of work.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.simulation.machines import SharedCores
from megatron_rl.simulation.records import WARM_UP, RunRecords

_VERIFIERS = "verifiers"


class SpeedCurve:
    """The share of its full speed that a role has over the time of a run."""

    def __init__(self, times: np.ndarray, speed: np.ndarray) -> None:
        """speed: from each of the times to the next."""
        self._times = times
        self._work = np.concatenate([[0.0], np.cumsum(speed[:-1] * np.diff(times))])

    def work(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[intervals] seconds at full speed that fit into them."""
        found = np.interp(ends, self._times, self._work)
        return found - np.interp(starts, self._times, self._work)

    def speed(self, start: float, end: float) -> float:
        """Share of its full speed that the role had on average between two moments."""
        if end <= start:
            return 1.0
        return float(self.work(np.array([start]), np.array([end]))[0]) / (end - start)


class CoreUse:
    """Who computed when, and how fast each role could."""

    def __init__(
        self, run: RunRecords, cores: SharedCores | None, hand_over_s: float = 0.0
    ) -> None:
        """cores: None: nobody slows anybody. hand_over_s: of each completion."""
        engines: dict[str, list[tuple[float, float]]] = {}
        hosts: dict[str, list[tuple[float, float]]] = {}
        for record in run.rollouts:
            times = record.times
            end = max(times.leased, times.done - hand_over_s)
            engines.setdefault(record.generator, []).append((times.leased, end))
            if hand_over_s:
                hosts.setdefault(record.generator, []).append((end, times.done))
            if times.scored is not None:
                hosts.setdefault(_VERIFIERS, []).append((times.done, times.scored))
        updates = [update_span(row) for row in run.every_step]
        roles = [*engines.values(), *hosts.values()]
        everything = [*updates, *(span for spans in roles for span in spans)]
        self._times = np.unique(np.array(everything).ravel())
        working = sum(self._busy(spans) for spans in engines.values())
        serving = sum(self._busy(spans) for spans in hosts.values())
        self._users = np.stack(np.broadcast_arrays(self._busy(updates), working, serving), axis=1)
        self._set_speeds(cores)

    def _set_speeds(self, cores: SharedCores | None) -> None:
        speeds = np.ones((len(self._times), 2))
        if cores is not None:
            kinds, which = np.unique(self._users, axis=0, return_inverse=True)
            found = [
                cores.speed(trains=bool(trains), engines=int(engines), hosts=int(hosts))
                for trains, engines, hosts in kinds
            ]
            speeds = np.array(found)[which.ravel()]
        self.trainer = SpeedCurve(self._times, speeds[:, 0])
        """Of the trainer and verifiers."""
        self.engines = SpeedCurve(self._times, speeds[:, 1])
        """Of generators and their engines."""

    def at(self, cores: SharedCores | None) -> "CoreUse":
        """The same run, if its roles shared the cores like this."""
        other = copy.copy(self)
        other._set_speeds(cores)
        return other

    def _busy(self, spans: list[tuple[float, float]]) -> np.ndarray:
        """[times] 1 where one of the spans covers what follows, else 0."""
        begins, ends = np.array(spans).T
        running = np.searchsorted(np.sort(begins), self._times, side="right")
        return ((running - np.searchsorted(np.sort(ends), self._times, side="right")) > 0) * 1.0

    def update_work(self, row: dict) -> float:
        """Seconds at full speed of a step's update."""
        start, end = update_span(row)
        return float(self.trainer.work(np.array([start]), np.array([end]))[0])

    def update_share(self, rows: Sequence[dict[str, Any]]) -> float:
        """Share of the time of updates that they would take at full speed."""
        return sum(map(self.update_work, rows)) / sum(row["train/update_s"] for row in rows)


def alone_share(run: RunRecords) -> float | None:
    """Share of an update's time that it takes when no engine works beside it: by tokens a second.

    Told by the last steps of a run, when engines have nothing left to do. None: no step tells.
    """
    begins, ends = (
        np.sort([getattr(record.times, name) for record in run.rollouts])
        for name in ("leased", "done")
    )
    alone = []
    for row in run.every_step[WARM_UP:]:
        start, end = update_span(row)
        in_flight = np.searchsorted(begins, end) - np.searchsorted(ends, start)
        if in_flight <= 0 and "train/tokens_per_s" in row:
            alone.append(row)
    if not alone:
        return None
    return min(1.0, _tokens_per_s(run.steps) / _tokens_per_s(alone))


def _tokens_per_s(rows: Sequence[dict[str, Any]]) -> float:
    seconds = sum(row["train/update_s"] for row in rows)
    return sum(row["train/tokens_per_s"] * row["train/update_s"] for row in rows) / seconds


def update_span(row: dict) -> tuple[float, float]:
    """When the update of a step ran: its row is written after the weight sync."""
    end = row["time"] - row.get("weight_sync/s", 0.0) - row.get("checkpoint/stall_s", 0.0)
    return end - row["train/update_s"], end
