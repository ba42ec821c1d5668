"""Inner products of checkpoints' differences from a common centre, streamed over their weights.

Used by `megatron-rl analyse weights`. With W_c of K rows, the differences of K checkpoints, the
principal directions need only G = W_c W_c^T, K x K; a chunk of parameters adds its own product.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from megatron_rl.analysis.checkpoints import CHUNK_BYTES, OpenCheckpoints

Centre = Literal["mean", "first"]


def centre_weights(count: int, centre: Centre) -> np.ndarray:
    """[count]: the centre as a combination of checkpoints; adds up to 1."""
    if centre == "mean":
        return np.full(count, 1 / count)
    return np.eye(count)[0]


def gram_matrix(
    checkpoints: OpenCheckpoints,
    centre: Centre,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> np.ndarray:
    """[checkpoints, checkpoints] float64: sums over all parameters of products of differences.

    progress is told the parameters done, and all. Holds two chunks. Differences are taken before
    products, so that nothing cancels when checkpoints are close together. Raises InputError for
    weights that are not finite.
    """
    gram = np.zeros((checkpoints.count, checkpoints.count))
    total, done = checkpoints.parameters, 0
    for name in checkpoints.sizes:
        for _, values in checkpoints.chunks(name, chunk_bytes):
            values -= values.mean(axis=0) if centre == "mean" else values[0].copy()
            product = values @ values.T
            if not np.isfinite(product).all():
                checkpoints.check_finite(name)
            gram += product
            done += values.shape[1]
            progress(done, total)
    return gram
