"""Losses written down as their papers print them, token by token; for comparison."""

from torch import Tensor


def clipped_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, *, high: float = 1.28
) -> Tensor:
    """Magistral's (arXiv 2506.10910, section 2.1), as it stood before it was put together of parts.

    A later one must be equal bit for bit.
    """
    ratio = (logprobs - old).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1 - 0.2, high) * advantages
    return -(weights * free.minimum(clipped)).sum()
