"""Metrics of the trainer: collected over a step, written by rank 0.

Runs in trainer ranks.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from megatron_rl.protocol.metrics import JsonlWriter, Metric, MetricSet, Reduce

log = logging.getLogger(__name__)
_DIGITS = 12
_SHOWN = (
    "rollout/reward",
    "rollout/correct",
    "train/loss",
    "train/grad_norm",
    "wait/batch_s",
    "train/update_s",
)


class StepMetrics:
    """Folds contributions of one step; `flush` writes a row and a log line."""

    def __init__(self, path: Path, source: str) -> None:
        self._set = MetricSet()
        self._writer = JsonlWriter(path, source) if dist.get_rank() == 0 else None

    def write_start(self, facts: dict[str, str | int]) -> None:
        """The first row: what the run is."""
        if self._writer is not None:
            self._writer.write(-1, dict(facts))

    def add(self, metrics: Iterable[Metric]) -> None:
        """Fold metrics of this process in."""
        self._set.add(metrics)

    def add_entries(self, entries: dict[str, tuple[float, float, Reduce]]) -> None:
        """Fold metrics of another process in."""
        self._set.add_entries(entries)

    def flush(self, step: int, metrics: Iterable[Metric] = ()) -> None:
        """Write what was collected as the row of `step`, and start anew."""
        self._set.add(metrics)
        values = self._set.values()
        self._set.clear()
        if self._writer is None:
            return
        self._writer.write(step, {name: _rounded(value) for name, value in values.items()})
        shown = (f"{name} {values[name]:.4g}" for name in _SHOWN if name in values)
        log.info("step %d: %s", step, ", ".join(shown))


def _rounded(value: float) -> float:
    """Significant digits, not decimals: a learning rate of 1e-9 stays one."""
    return float(f"{value:.{_DIGITS}g}")
