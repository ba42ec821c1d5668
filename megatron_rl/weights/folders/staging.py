"""Folders that appear whole or not at all, also in place of an older one.

Used by trainer ranks, by conversions and, to clear up, by the launcher. One process at a time
writes a folder. A process may be killed at any moment; a loss of power is not covered.

    model              the folder, always whole
    model.partial      being written; after an exchange the older folder, about to be removed
    model.replaced     the older folder, on file systems that cannot exchange two names
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".partial"
_REPLACED = ".replaced"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Errors of file systems without the flag (NFS, some overlays), and of Linux before 3.15.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP)


@contextmanager
def staged(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """An empty folder next to `folder` that takes its name when the block ends, or else vanishes.

    Remains of a killed process are removed first. replaces: an older `folder` stays until
    then, and is removed afterwards; without it one is a FileExistsError.
    """
    if replaces:
        recover(folder)
    elif folder.exists():
        raise FileExistsError(f"{folder} exists already")
    staging = folder.with_name(folder.name + _SUFFIX)
    _remove(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        if not folder.exists():
            os.replace(staging, folder)
        elif not exchange(staging, folder):
            rename_over(staging, folder)
    finally:
        # Also the older folder, after an exchange.
        _remove(staging)


def recover(folder: Path) -> None:
    """Finish the renames of a process that was killed in `rename_over`."""
    older = folder.with_name(folder.name + _REPLACED)
    if older.exists() and not folder.exists():
        os.replace(older, folder)
    _remove(older)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically; False: the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # glibc before 2.28
        return False
    names = os.fsencode(first), os.fsencode(second)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in _UNSUPPORTED:
        return False
    raise OSError(error, os.strerror(error), str(first), None, str(second))


def rename_over(staging: Path, folder: Path) -> None:
    """Replace `folder` by `staging` with two renames.

    Killed between them, `folder` is missing until `recover`, which the next launcher calls.
    """
    older = folder.with_name(folder.name + _REPLACED)
    os.replace(folder, older)
    os.replace(staging, folder)
    _remove(older)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
