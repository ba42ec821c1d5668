"""Which cases of a matrix a run takes: drawn by a seed, the commit if no other is given.

tests/conftest.py applies it. A name is drawn by a hash of the seed and itself, so that the order of
names does not decide, and each has the same chance under a new seed.
"""

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_COMMIT = "0"


def commit_seed(folder: Path = ROOT) -> str:
    """The commit that is checked out in the folder, abbreviated; NO_COMMIT where there is none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return NO_COMMIT
    return done.stdout.strip() if done.returncode == 0 else NO_COMMIT


def draw(names: Iterable[str], count: int, seed: str) -> set[str]:
    """So many of the names, or all where there are no more."""
    return set(sorted(names, key=lambda name: _place(name, seed))[:count])


def draw_share(seconds: Mapping[str, float], share: float, seed: str) -> set[str]:
    """Names that take this share, 0 to 1, of all seconds together, at least one if share > 0.

    A name that would exceed it is left out, so that runs take about the same time. Whether `draw`
    took a name says nothing about it.
    """
    # The tolerance is for the rounding of the sum.
    left = share * sum(seconds.values()) * (1 + 1e-9)
    drawn: set[str] = set()
    for name in sorted(seconds, key=lambda name: _place(name, f"share {seed}")):
        if seconds[name] <= left or (share > 0 and not drawn):
            drawn.add(name)
            left -= seconds[name]
    return drawn


def _place(name: str, seed: str) -> float:
    """In [0, 1), uniform over seeds."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
