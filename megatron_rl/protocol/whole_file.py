"""Atomic writes of files, which other processes may read, and files for their user alone.

Used by the launcher and commands.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of what holds secrets: only its user gets in."""


def write_whole(
    path: Path, content: str | bytes | Sequence[bytes | memoryview], *, is_private: bool = False
) -> None:
    """Replace a file atomically; concurrent writers are safe.

    content: a text, or its bytes, whole or in parts. is_private: only this user may read it,
    whatever the umask.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        # The folder has mode 0700, so nobody reads the file before its mode is set.
        content = content.encode() if isinstance(content, str) else content
        with made.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        if is_private:
            made.chmod(PRIVATE_FILE)
        made.replace(path)


def write_private(path: Path, content: str) -> None:
    """Write a new file that only this user may read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
