"""Compresses expert numbers (train.router_replay). Used by generators before they send.

A rollout has a number for each layer and chosen expert of every token: many times the bytes of all
its other data.
"""

import numpy as np

NARROW = (np.uint8, np.int16)
"""For up to 256 experts, or 32,768 and -1."""


def narrow_choices(choices: np.ndarray) -> np.ndarray:
    """The numbers in the first dtype of NARROW that holds all, else unchanged (int32)."""
    least, most = (int(choices.min()), int(choices.max())) if choices.size else (0, 0)
    for dtype in NARROW:
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return choices.astype(dtype)
    return choices
