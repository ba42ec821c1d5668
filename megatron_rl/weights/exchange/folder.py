"""Files of a weight sync, in a folder or an object store.

Used by trainer ranks and engine ranks, and by the launcher's checks; needs fsspec alone.
"""

import logging
import re
from collections.abc import Sequence

import fsspec

log = logging.getLogger(__name__)

_PROBE = "weights-0/probe"
"""A file of a syncer that there is not: `remove_all` takes what may be left of it."""

_SYNCERS = re.compile(r"weights-\d+")
"""Names of syncers, of this run and of earlier ones."""


class Folder:
    """Files of syncers below `expert.weights.folder`, by the names SYNCER/FILE."""

    def __init__(self, url: str) -> None:
        """url: a path, or a URL that fsspec opens, with what that needs installed."""
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._made: set[str] = set()
        """Folders of syncers that this process has made."""

    def write(self, name: str, content: bytes) -> None:
        """Raises RuntimeError."""
        path, syncer = f"{self._root}/{name}", name.partition("/")[0]
        try:
            if syncer not in self._made:
                self._files.makedirs(f"{self._root}/{syncer}", exist_ok=True)
                self._made.add(syncer)
            self._files.pipe_file(path, content)
        except OSError as error:
            raise RuntimeError(f"cannot write {path}: {error}") from error

    def read(self, name: str) -> bytes:
        """Raises RuntimeError."""
        path = f"{self._root}/{name}"
        try:
            content: bytes = self._files.cat_file(path)
        except OSError as error:
            raise RuntimeError(f"cannot read {path}: {error}") from error
        return content

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; one that cannot be removed stays, with a warning."""
        for name in names:
            self._remove(f"{self._root}/{name}")

    def remove_all(self) -> None:
        """Remove the files of all syncers, of this run and of earlier ones that left some."""
        try:
            found = self._files.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("old files may stay in %s: %s", self._root, error)
            return
        for path in found:
            if _SYNCERS.fullmatch(path.rstrip("/").rpartition("/")[2]):
                self._remove(path)

    def _remove(self, path: str) -> None:
        try:
            self._files.rm(path, recursive=True)
        except OSError as error:
            log.warning("%s stays: %s", path, error)


def check_folder(url: str) -> None:
    """Write, read and remove a file there. Raises RuntimeError."""
    try:
        folder = Folder(url)
    except (ValueError, ImportError) as error:
        raise RuntimeError(f"fsspec cannot open {url}: {error}") from error
    folder.write(_PROBE, b"probe")
    if folder.read(_PROBE) != b"probe":
        raise RuntimeError(f"{url} does not hold what was written to it")
    folder.remove([_PROBE])
