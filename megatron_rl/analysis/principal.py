"""Principal directions of checkpoints, from the inner products of their differences.

Used by `megatron-rl analyse`. Directions and points of the plane are kept as combinations of
checkpoints, never as vectors of all parameters. Let the K rows of W_c be the differences of K
checkpoints from their centre: the directions need only G = W_c W_c^T, K x K, a sum over chunks of
parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_rl.analysis.checkpoints import CHUNK_BYTES, OpenCheckpoints
from megatron_rl.config.errors import InputError

Centre = Literal["mean", "first"]


def centre_weights(count: int, centre: Centre) -> np.ndarray:
    """[count]: the centre as a combination of checkpoints; sums to 1."""
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
    """[checkpoints, checkpoints] float64: inner products of the differences from the centre.

    progress gets the parameters done and in total. Memory holds two chunks. Subtracting before
    multiplying avoids cancellation for close checkpoints. Raises InputError for NaN or infinite
    weights.
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


_RANK_TOLERANCE = 1e-13
"""Eigenvalues below this share of the largest are rounding errors."""
_SIGN_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Principal:
    """Checkpoints in the space of their principal directions."""

    centre: np.ndarray
    """[checkpoints]: the centre as a combination of checkpoints; sums to 1."""
    coordinates: np.ndarray
    """[checkpoints, directions] float64, in Euclidean distance between weights."""
    combinations: np.ndarray
    """[directions, checkpoints]: each unit direction as a combination; sums to 0."""

    @property
    def explained(self) -> np.ndarray:
        """[directions]: shares of the squared distances from the centre, descending."""
        squares = (self.coordinates**2).sum(axis=0)
        return squares / squares.sum()

    def weights_of(self, point: Sequence[float]) -> np.ndarray:
        """[checkpoints]: the point with these first coordinates, as a combination."""
        return self.centre + np.asarray(point) @ self.combinations[: len(point)]

    def residuals(self, directions: int) -> np.ndarray:
        """[checkpoints]: distance from the span of the first `directions` directions."""
        return np.sqrt((self.coordinates[:, directions:] ** 2).sum(axis=1))


def principal_directions(gram: np.ndarray, centre: Centre) -> Principal:
    """Eigen-decomposition of the inner products, without directions that are rounding errors.

    Sign of a direction: the last checkpoint with a nonzero coordinate has a positive one. Raises
    InputError when all checkpoints are equal.
    """
    squares, vectors = np.linalg.eigh(gram)
    squares, vectors = squares[::-1], vectors[:, ::-1]
    if not squares[0] > 0:
        raise InputError(
            "all checkpoints have the same weights: there is no direction between them"
        )
    rank = int((squares > _RANK_TOLERANCE * squares[0]).sum())
    lengths, vectors = np.sqrt(squares[:rank]), vectors[:, :rank]
    for vector in vectors.T:
        vector *= np.sign(vector[np.abs(vector) > _SIGN_TOLERANCE][-1])
    offset = centre_weights(len(gram), centre)
    differences = np.eye(len(gram)) - offset
    combinations = (vectors / lengths).T @ differences
    return Principal(offset, vectors * lengths, combinations)


def distances(gram: np.ndarray) -> np.ndarray:
    """[checkpoints, checkpoints]: Euclidean distances between weights."""
    own = np.diag(gram)
    return np.sqrt(np.maximum(own[:, None] + own - 2 * gram, 0))


def step_cosines(gram: np.ndarray) -> np.ndarray:
    """[checkpoints - 2]: cosine between consecutive steps; NaN for a step of length 0."""
    # Row k of `moves` is checkpoint k + 1 minus checkpoint k.
    moves = np.diff(np.eye(len(gram)), axis=0)
    products = moves @ gram @ moves.T
    lengths = np.sqrt(np.diag(products))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.diag(products, 1) / (lengths[1:] * lengths[:-1])


def random_walk_explained(count: int, centre: Centre) -> np.ndarray:
    """Explained shares of a random walk of equal, mutually perpendicular steps.

    A path with no larger first shares has no preferred direction.
    Source: Antognini and Sohl-Dickstein, "PCA of high dimensional random walks" (arXiv 1806.08805).
    """
    steps = np.arange(count)
    gram = np.minimum.outer(steps, steps).astype(float)
    differences = np.eye(count) - centre_weights(count, centre)
    squares = np.linalg.eigvalsh(differences @ gram @ differences.T)[:0:-1]
    return squares / squares.sum()
