"""Types of numbers in messages, with the limits that a receiver enforces as it reads them.

Imported by every process. msgspec refuses a number outside of its limits, NaN and infinity
included. What limits of single numbers cannot say, such as lengths that must agree, is said by the
method `find_fault` of a message, which `frames.py` calls.
"""

from typing import Annotated

import msgspec
import numpy as np

INT32_MAX = 2**31 - 1
_ID_MAX = 2**53
_LARGEST = 1e30
"""Its square is still a float64."""
LARGEST_PART = 1e24
"""Of a part of a reward, so that a reward of many such parts is Finite."""

Count = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
"""A number of things, or a place among them."""
Change = Annotated[int, msgspec.Meta(ge=-INT32_MAX, le=INT32_MAX)]
"""A difference of numbers of things."""
Size = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
"""A number of ranks, nodes or the like."""
Version = Annotated[int, msgspec.Meta(ge=-1, le=INT32_MAX)]
"""A policy version; -1: none."""
Id = Annotated[int, msgspec.Meta(ge=0, le=_ID_MAX)]
"""A number that its sender counts."""
SignedId = Annotated[int, msgspec.Meta(ge=-_ID_MAX, le=_ID_MAX)]
"""An Id; below 0 only in a verifier, whose comparisons of two answers are requests, too."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=_LARGEST)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
"""A word that may become part of a metric's name, or the key of a table."""


def find_bad_ids(name: str, ids: np.ndarray, *, most: int = INT32_MAX) -> str:
    """Why an array does not hold token ids from 0 to `most`; "" if it does."""
    if ids.dtype != np.int32:
        return f"{name} are {ids.dtype}, expected int32"
    if len(ids) and not 0 <= ids.min() <= ids.max() <= most:
        return f"{name} from {ids.min()} to {ids.max()}, expected 0 to {most}"
    return ""


def find_bad_floats(name: str, values: np.ndarray) -> str:
    """Why an array does not hold finite float32; "" if it does."""
    if values.dtype != np.float32:
        return f"{name} are {values.dtype}, expected float32"
    if not np.isfinite(values).all():
        return f"{name} have {values[int(np.argmin(np.isfinite(values)))]}"
    return ""
