"""Experts' numbers in as few bytes as hold them exactly. Used by generators, before they send.

A rollout of a mixture of experts carries a number for each layer and expert of every token: many
times the bytes of everything else in it.
"""

import numpy as np

NARROW = (np.uint8, np.int16)
"""Hold the numbers of up to 256 and 32,768 experts; the second one -1 too."""


def narrow_choices(choices: np.ndarray) -> np.ndarray:
    """The same numbers in the first of NARROW that holds all, or as they came (int32)."""
    least, most = (int(choices.min()), int(choices.max())) if choices.size else (0, 0)
    for dtype in NARROW:
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return choices.astype(dtype)
    return choices
