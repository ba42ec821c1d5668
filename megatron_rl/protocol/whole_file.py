"""Atomic writes of files, which other processes may read, and files for their user alone.

Used by every process.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.errors import InputError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of what holds secrets: only its user gets in."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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


def check_writable(folder: Path, fix: str) -> None:
    """Raise InputError if this user cannot make the folder, or write into it. fix: what to do."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {folder}: {place} is no writable folder; {fix}")


def write_private(path: Path, content: str) -> None:
    """Write a new file that only this user may read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)


def make_private(run_dir: Path) -> str:
    """Close a run folder and its configurations to other users; returns a text about it, or "".

    The text says what was open, or what could not be closed.
    """
    paths = (run_dir, *run_dir.glob("config*.toml"))
    open_to_others = {path: mode for path in paths if (mode := _mode(path)) & _OTHERS}
    try:
        for path, mode in open_to_others.items():
            path.chmod(mode & ~_OTHERS)
    except OSError as error:
        return (
            f"other users can read {path} (mode {mode:04o}): it or a file in it holds the label of "
            f"the run's sockets. Its mode could not be changed ({error.strerror}): have its owner "
            f"run `chmod go= {path}`"
        )
    if not open_to_others:
        return ""
    mode = next(iter(open_to_others.values()))
    return (
        f"the run folder {run_dir} was open to other users (mode {mode:04o}) "
        "and is now closed to them, because it holds the label of the run's sockets; "
        "docs/run-folder.md says how a group shares runs"
    )


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
