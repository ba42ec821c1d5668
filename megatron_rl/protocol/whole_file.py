"""Writes files that other processes read at any time, or that a crash must not cut short.

Used by the launcher and by commands.
"""

import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the content of a file at once; writers at the same time do not disturb each other."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        made.write_bytes(content.encode() if isinstance(content, str) else content)
        made.replace(path)
