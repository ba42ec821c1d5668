"""Fits an engine's costs to the passes that it counted. Pure.

Used by calibration, where an engine tells what its passes cost (`protocol/engine_passes.py`).
"""

from collections.abc import Sequence

import numpy as np

from megatron_rl.protocol.engine_passes import PassRow
from megatron_rl.simulation.load_curve import fit_not_negative

_LEAST_OTHERS = 0.05
"""Share of the prefills that has to be after another pass."""


def fit_decoding(rows: Sequence[PassRow]) -> tuple[float, float, float, float]:
    """Seconds of a decoding pass, of each completion and token in it, and of each that ends."""
    decoding = [row for row in rows if row.kind == "decode"]
    counts = [(row.passes, row.completions, row.tokens, row.ended) for row in decoding]
    base, running, kv, ended = _fit(decoding, counts)
    return base, running, kv, ended


def fit_prefill(rows: Sequence[PassRow]) -> tuple[float, float, float, float]:
    """Seconds of a prefill pass, of each completion and token, and of a rest before it.

    Tokens beyond one of each completion: the last of a prompt that the engine knows is prefilled
    again.
    """
    prefills = _prefills(rows)
    after_rest = sum(row.passes for row in prefills if row.kind == "wake")
    # Where nearly all are after a rest, nothing tells what that costs.
    tells = 1 - after_rest / sum(row.passes for row in prefills) > _LEAST_OTHERS
    counts = [
        (
            row.passes,
            row.completions,
            max(0, row.tokens - row.completions),
            row.passes * (tells and row.kind == "wake"),
        )
        for row in prefills
    ]
    base, request, token, wake = _fit(prefills, counts)
    return base, request, token, wake


def prefilled_tokens(rows: Sequence[PassRow]) -> int:
    """Of all prefills, beyond one of each completion."""
    return sum(max(0, row.tokens - row.completions) for row in _prefills(rows))


def _prefills(rows: Sequence[PassRow]) -> list[PassRow]:
    return [row for row in rows if row.kind in ("prefill", "wake")]


def _fit(rows: Sequence[PassRow], counts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Least squares in shares of a pass's time, so that small ones count as much as large ones.

    Then such that all passes together take what they took: shares alone believe the quick ones.
    """
    seconds = np.array([row.seconds for row in rows])
    weights = np.sqrt([row.passes for row in rows]) / seconds
    columns = np.array(counts, float)
    found = fit_not_negative(columns * weights[:, None], seconds * weights)
    longer = seconds.sum() / (columns @ found).sum()
    return tuple(float(x) for x in found * longer)


def sizes_of(rows: Sequence[PassRow]) -> tuple[float, float]:
    """Between which lie the completions of nine of ten decoding passes."""
    decoding = [row for row in rows if row.kind == "decode"]
    sizes = [row.completions / row.passes for row in decoding]
    return middle_of(np.array(sizes), np.array([row.passes for row in decoding], float))


def middle_of(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Quantiles 0.05 and 0.95 of weighted values."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = np.searchsorted(reached, [0.05, 0.95])
    return float(values[order[low]]), float(values[order[min(high, len(values) - 1)]])
