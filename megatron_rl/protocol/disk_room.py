"""Writes that wait while a disk has no room, and texts that name a disk's fault.

Imported by every process that writes to a run folder.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_rl.config.errors import InputError

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")

RETRY_S = 0.2
_WARN_S = 60.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN)
_REPEAT = "then repeat the command: the run resumes from its newest checkpoint"


class Shortage:
    """Counts the time for which a file could not be written because its disk was full."""

    def __init__(self, path: Path, limit_s: float) -> None:
        """limit_s: longest time without a successful write."""
        self._path, self._limit_s = path, limit_s
        self._since_s: float | None = None
        """time.monotonic() of the first failure in a row."""
        self._warned_s = 0.0

    def note(self, error: OSError) -> None:
        """Note a failed write. Raises InputError unless more room would help within the limit."""
        now = time.monotonic()
        if error.errno not in _NO_ROOM:
            raise InputError(write_error(self._path, error)) from error
        if self._since_s is None:
            self._since_s, self._warned_s = now, now - _WARN_S
        if now - self._since_s >= self._limit_s:
            text = write_error(self._path, error, waited_s=self._limit_s)
            raise InputError(text) from error
        if now - self._warned_s >= _WARN_S:
            self._warned_s = now
            left_s = self._limit_s - (now - self._since_s)
            log.warning(
                "%s waits for room, for at most %.0f s more: %s; %s",
                self._path, left_s, error.strerror, free_text(self._path),
            )  # fmt: skip

    def end(self) -> None:
        """Note a successful write."""
        if self._since_s is not None:
            log.warning("%s is written again", self._path)
            self._since_s = None


def write_when_room(
    path: Path,
    write: Callable[[], Kind],
    *,
    limit_s: float,
    undo: Callable[[], None] = lambda: None,
) -> Kind:
    """The result of `write`, which is repeated while the disk of `path` is full.

    undo: removes a part that a failed `write` has left. Raises InputError after limit_s, and at
    once if room is not what the disk lacks.
    """
    shortage = Shortage(path, limit_s)
    while True:
        try:
            result = write()
        except OSError as error:
            undo()
            shortage.note(error)
            time.sleep(RETRY_S)
        else:
            shortage.end()
            return result


def write_error(path: Path, error: OSError, *, waited_s: float = 0.0) -> str:
    """Why a file could not be written, and what to do. waited_s: time of waiting for room."""
    for_s = f" for {waited_s:.0f} s" if waited_s else ""
    begin = f"{path} could not be written{for_s}: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        return f"{begin}; {free_text(path)}. Make room, {_REPEAT}"
    if error.errno == errno.EROFS:
        return f"{begin}. Mount its disk for writing, {_REPEAT}"
    if error.errno in _GONE and not path.parent.exists():
        return f"{begin}; the folder {path.parent} is gone. Bring it back or mount it, {_REPEAT}"
    return f"{begin}. Repair the disk, {_REPEAT}"


def free_text(path: Path) -> str:
    """How much room the disk of a path has."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        free = found.f_bavail * found.f_frsize / 1e9
        return f"the disk of {place} has {free:.3g} GB and {found.f_favail} files free"
    return "its disk is gone"
