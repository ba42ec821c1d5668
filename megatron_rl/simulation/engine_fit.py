"""Fits the cost of an engine's iteration to the completions of a run. Pure; used by calibration.

A completion of T tokens took T - 1 iterations after its first token, or T after its lease if the
engine does not report the first token. The engine's other completions give the running completions
and cached tokens of these iterations. Prefills count as part of an iteration.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.records import RunRecords, Sampled, sampled


@dataclass(frozen=True)
class FittedEngine:
    """The model of one of the run's engines, and its range of batch sizes."""

    model: EngineModel
    least_running: float
    most_running: float
    """Nine of ten iterations have a number of completions in this range."""


def fit_engine(run: RunRecords) -> FittedEngine:
    """Fit seconds per iteration, running completion and cached token by least squares."""
    by_engine: defaultdict[str, list[Sampled]] = defaultdict(list)
    for record in run.rollouts:
        by_engine[record.generator] += sampled(record)
    parts = [_iterations(run, work) for work in by_engine.values()]
    steps, seconds, columns = (np.concatenate(part) for part in zip(*parts, strict=True))
    running = columns[:, 1]
    # Completions that ran together share iterations; each iteration counts once.
    share = steps / np.maximum(running, 1.0)
    weight = np.sqrt(share)
    base, per_running, per_kv = fit_not_negative(columns * weight[:, None], seconds * weight)
    model = EngineModel(
        base_s=max(float(base), 1e-6),
        per_running_s=float(per_running),
        per_kv_token_s=float(per_kv),
        prefill_s_per_token=0.0,
        max_running=run.config.generator.max_running,
        kv_tokens=run.config.generator.bounded_kv_tokens,
    )
    return FittedEngine(model, *_middle(running, share))


def _iterations(run: RunRecords, work: list[Sampled]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([completions] iterations, [completions] seconds of one, [completions, 3] columns).

    Columns of the fit: 1, running completions, cached tokens.
    """
    asked, starts, ends, prompts, tokens = map(np.array, zip(*work, strict=True))
    steps = tokens - (starts > asked)
    load = LoadCurve(asked, ends, prompts, tokens)
    used = (ends > starts) & (steps > 0) & (ends > run.began_at) & (ends < run.ended_at)
    starts, ends, steps = starts[used], ends[used], steps[used]
    running, kv = load.means(starts, ends)
    return steps, (ends - starts) / steps, np.stack([np.ones_like(kv), running, kv], axis=1)


def _middle(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Quantiles 0.05 and 0.95 of weighted values."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = np.minimum(np.searchsorted(reached, [0.05, 0.95]), len(values) - 1)
    return float(values[order[low]]), float(values[order[high]])


class LoadCurve:
    """Running completions and cached tokens of one engine over time.

    A completion's tokens are spread evenly between its start and its end.
    """

    def __init__(
        self, starts: np.ndarray, ends: np.ndarray, prompts: np.ndarray, tokens: np.ndarray
    ) -> None:
        """[completions] each: unix seconds, prompt tokens, completion tokens."""
        times = np.concatenate([starts, ends])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        rate = tokens / np.maximum(ends - starts, 1e-9)
        slopes = np.cumsum(np.concatenate([rate, -rate])[order])
        ones = np.ones_like(rate)
        running = np.cumsum(np.concatenate([ones, -ones])[order])
        # Cached tokens just after each event: joined, left, and grown since the last event.
        kv = np.cumsum(np.concatenate([prompts, -(prompts + tokens)])[order] * 1.0)
        kv[1:] += np.cumsum(slopes[:-1] * np.diff(self._times))
        self._values, self._slopes = (running, kv), (np.zeros_like(slopes), slopes)

    def means(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[intervals] mean running completions and mean cached tokens."""
        running, kv = (
            (self._area(values, slopes, ends) - self._area(values, slopes, starts))
            / np.maximum(ends - starts, 1e-9)
            for values, slopes in zip(self._values, self._slopes, strict=True)
        )
        return running, kv

    def _area(self, values: np.ndarray, slopes: np.ndarray, when: np.ndarray) -> np.ndarray:
        passed = np.diff(self._times)
        parts = (values[:-1] + slopes[:-1] * passed / 2) * passed
        area = np.concatenate([[0.0], np.cumsum(parts)])
        place = np.clip(np.searchsorted(self._times, when, side="right") - 1, 0, None)
        since = when - self._times[place]
        return area[place] + (values[place] + slopes[place] * since / 2) * since


def fit_not_negative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[columns] the least squares solution of columns @ x = values with x >= 0."""
    # Listing commands and options must not load SciPy.
    from scipy.optimize import nnls

    # Cached tokens are 1e5 times the iterations: unscaled columns lose digits.
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    solution, _ = nnls(columns / scale, values)
    return solution / scale
