"""Writes that wait while a disk has no room, and texts that name a disk's fault.

Imported by every process that writes to a run folder.
"""

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from megatron_rl.config.errors import InputError

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")

LIMIT_S = 1800.0
"""Limit for rows and records; the default of expert.checkpoint.write_timeout_s."""
RETRY_S = 0.2
_WARN_S = 60.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
LOST_FOLDER = (errno.EROFS, *_GONE)
"""Errors of a folder that is read-only or gone."""
_NUMBER = re.compile(r"os error (\d+)")
_RESERVED_BYTES = 16 << 20


class WriteFailed(InputError):
    """A file could not be written; the text says why and what to do."""

    def __init__(self, path: Path, error: OSError, *, waited_s: float = 0.0) -> None:
        """waited_s: how long room was waited for."""
        for_s = f" for {waited_s:.0f} s" if waited_s else ""
        self.fault = f"{path} could not be written{for_s}: {error.strerror or error}"
        """Without what to do."""
        fix = "Repair the disk"
        if error.errno in _NO_ROOM:
            self.fault += f"; {free_text(path)}"
            fix = "Make room"
        elif error.errno == errno.EROFS:
            fix = "Mount its disk for writing"
        elif error.errno in _GONE and not path.parent.exists():
            self.fault += f"; the folder {path.parent} is gone"
            fix = "Bring it back or mount its disk"
        super().__init__(
            f"{self.fault}. {fix}, then repeat the command: a run resumes from its newest "
            "checkpoint"
        )


class Shortage:
    """Counts the time for which a file could not be written because its disk was full."""

    def __init__(self, path: Path, limit_s: float) -> None:
        """limit_s: longest time without a successful write."""
        self._path, self._limit_s = path, limit_s
        self._since_s: float | None = None
        """time.monotonic() of the first failure in a row."""
        self._warned_s = 0.0

    def note(self, error: OSError) -> None:
        """Note a failed write. Raises WriteFailed unless room within the limit would help."""
        now = time.monotonic()
        if error.errno not in _NO_ROOM:
            raise WriteFailed(self._path, error) from error
        if self._since_s is None:
            self._since_s, self._warned_s = now, now - _WARN_S
        if now - self._since_s >= self._limit_s:
            raise WriteFailed(self._path, error, waited_s=self._limit_s) from error
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

    undo: removes a part that a failed `write` has left. Raises WriteFailed after limit_s, and at
    once if room is not what the disk lacks.
    """
    shortage = Shortage(path, limit_s)
    while True:
        try:
            result = write()
        except OSError as error:
            try:
                undo()
            except OSError:
                raise WriteFailed(path, error) from error
            shortage.note(error)
            time.sleep(RETRY_S)
        else:
            shortage.end()
            return result


@contextlib.contextmanager
def os_errors_of(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of torch's or safetensors' writers into the OSError that caused them."""
    try:
        yield
    except kinds as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror) from error
        if (found := _NUMBER.search(str(error))) is not None:
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        raise


def disk_fault(error: OSError, folder: Path) -> WriteFailed | None:
    """The error to show if a disk is full, read-only or gone; None for other errors.

    folder: was there before; stands for a file that the error does not name.
    """
    is_full = error.errno in (*_NO_ROOM, errno.EROFS)
    if not is_full and (error.errno not in _GONE or folder.exists()):
        return None
    return WriteFailed(Path(error.filename or folder / "a file"), error)


@contextlib.contextmanager
def disk_faults_named(folder: Path) -> Iterator[None]:
    """Raise `disk_fault` for an OSError, as far as there is one."""
    try:
        yield
    except OSError as error:
        if (fault := disk_fault(error, folder)) is None:
            raise
        raise fault from error


def await_room(folder: Path, limit_s: float) -> None:
    """Wait until a folder's disk takes 16 MiB, for files of writers that cannot be repeated.

    Raises WriteFailed after limit_s.
    """
    path = folder / ".room"

    def reserve() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVED_BYTES)
        except OSError as error:
            # Not every file system can reserve room.
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    write_when_room(path, reserve, limit_s=limit_s)


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
