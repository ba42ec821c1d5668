"""Draws that depend on a seed and names alone: not on the order of rows, nor on the other rows."""

import hashlib


def place_of(seed: int, *names: str) -> float:
    """A number in [0, 1), the same for the same seed and names."""
    digest = hashlib.sha256("\0".join((str(seed), *names)).encode(errors="backslashreplace"))
    return int.from_bytes(digest.digest()[:6], "big") / 2**48
