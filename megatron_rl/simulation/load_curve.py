"""How many completions an engine had at each moment of a run, and how many tokens of them. Pure.

Used by calibration.
"""

from collections.abc import Sequence

import numpy as np


class LoadCurve:
    """Completions in flight and tokens in the cache of one engine over time.

    A completion's tokens are taken to come evenly between its start and its end.
    """

    def __init__(
        self,
        starts: Sequence[float],
        ends: Sequence[float],
        prompts: Sequence[float],
        tokens: Sequence[float],
    ) -> None:
        """[completions] each: unix seconds, prompt tokens, completion tokens."""
        begin, end = np.asarray(starts, float), np.asarray(ends, float)
        prompt, count = np.asarray(prompts, float), np.asarray(tokens, float)
        rate = count / np.maximum(end - begin, 1e-9)
        times = np.concatenate([begin, end])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        jumps = np.concatenate([np.ones_like(begin), -np.ones_like(end)])[order]
        running = np.cumsum(jumps)
        slopes = np.cumsum(np.concatenate([rate, -rate])[order])
        steps = np.concatenate([prompt, -(prompt + count)])[order]
        passed = np.diff(self._times)
        # Just after each event: what joined or left, and what grew since the one before.
        kv = np.cumsum(steps)
        kv[1:] += np.cumsum(slopes[:-1] * passed)
        self._running = running, np.zeros_like(running)
        self._kv = kv, slopes

    def mean_running(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[intervals] completions in flight."""
        return self._mean(*self._running, starts, ends)

    def mean_kv(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[intervals] tokens in the cache."""
        return self._mean(*self._kv, starts, ends)

    def _mean(
        self, values: np.ndarray, slopes: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Of what has these values just after the events, and these slopes from there on."""
        passed = np.diff(self._times)
        parts = (values[:-1] + slopes[:-1] * passed / 2) * passed
        area = np.concatenate([[0.0], np.cumsum(parts)])

        def area_until(when: np.ndarray) -> np.ndarray:
            place = np.clip(np.searchsorted(self._times, when, side="right") - 1, 0, None)
            since = when - self._times[place]
            return area[place] + (values[place] + slopes[place] * since / 2) * since

        return (area_until(ends) - area_until(starts)) / np.maximum(ends - starts, 1e-9)


def fit_not_negative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[columns] the least squares solution of columns @ x = values with no x below 0.

    columns: [values, few]. Every subset of columns is tried, so that the best one is found.
    """
    count = columns.shape[1]
    best, best_error = np.zeros(count), float(values @ values)
    for chosen in range(1, 1 << count):
        used = [i for i in range(count) if chosen >> i & 1]
        solution, *_ = np.linalg.lstsq(columns[:, used], values, rcond=None)
        if (solution < 0).any():
            continue
        difference = columns[:, used] @ solution - values
        error = float(difference @ difference)
        if error < best_error * (1 - 1e-9):
            best, best_error = np.zeros(count), error
            best[used] = solution
    return best
