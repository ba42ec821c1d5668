"""Fills a disk that a test has mounted."""

import os
from pathlib import Path


def fill_disk(folder: Path, *, left_bytes: int = 0) -> Path:
    """Take the room of a disk by a file, which is returned."""
    disk, filler = os.statvfs(folder), folder / "filler"
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - left_bytes))
    return filler
