"""Ports that launchers of this host have chosen and not bound yet: a locked file each.

Between the choice of a port and its first listener lie minutes, in which another launcher would
find it free, too. The kernel lets go of a lock when the process ends, however it ends. Launchers of
all users see each other's locks if they have the same temporary folder.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.errors import InputError

_NAME = "megatron_rl_ports"
_SHARED = 0o1777


class PortLocks:
    """The locks of this process; they hold until it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[int, int] = {}
        """Descriptor by port."""

    def take(self, ports: Iterable[int]) -> bool:
        """Lock all of these, or none where this or another process has one. Raises InputError."""
        taken: dict[int, int] = {}
        for port in ports:
            descriptor = None if port in self._held else self._lock(port)
            if descriptor is None:
                for earlier in taken.values():
                    os.close(earlier)
                return False
            taken[port] = descriptor
        self._held |= taken
        return True

    def _lock(self, port: int) -> int | None:
        """A descriptor that holds the lock; None where another process has it."""
        try:
            descriptor = self._open(self._folder / str(port))
        except OSError as error:
            # Of another user, who is about to make it readable.
            if isinstance(error, PermissionError) and os.access(self._folder, os.W_OK):
                return None
            raise InputError(
                f"cannot lock port {port} in {self._folder}: {error.strerror}; name another folder "
                "for temporary files by TMPDIR"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def _open(self, path: Path) -> int:
        if not self._folder.is_dir():
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir()
                # The modes of mkdir and open are narrowed by the umask.
                self._folder.chmod(_SHARED)
        # Reading is enough for a lock. Files of other users in a folder for all may not be opened
        # with O_CREAT (fs.protected_regular).
        with contextlib.suppress(FileExistsError):
            made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o444)
            os.fchmod(made, 0o444)
            os.close(made)
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def default_folder() -> Path:
    """Where the locks of a host are."""
    return Path(tempfile.gettempdir()) / _NAME
