"""Atomic writes of files, which other processes may read. Used by the launcher and commands."""

import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file atomically; concurrent writers are safe."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        made.write_bytes(content.encode() if isinstance(content, str) else content)
        made.replace(path)
