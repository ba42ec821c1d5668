"""Experts' numbers in as few bytes as hold them exactly. Used by generators, before they send.

A rollout of a mixture of experts carries a number for each layer and expert of every token: many
times the bytes of everything else in it.
"""

import numpy as np

NARROW = np.int16
"""Holds the numbers of up to 32,768 experts."""


def narrow_choices(choices: np.ndarray) -> np.ndarray:
    """The same numbers as int16, or as they came (int32) where one of them does not fit."""
    limits = np.iinfo(NARROW)
    if choices.size and not limits.min <= choices.min() <= choices.max() <= limits.max:
        return choices
    return choices.astype(NARROW)
