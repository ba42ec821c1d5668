"""Files of a weight sync, in a folder or an object store.

Used by trainer ranks and engine ranks, and by the launcher's checks; needs fsspec alone.
"""

import logging
import re
from collections.abc import Sequence

import fsspec

log = logging.getLogger(__name__)

_SYNCERS = re.compile(r"weights-\d+")
"""Names of syncers, of this run and of earlier ones."""


class Folder:
    """The files of one syncer, in a folder of their own in `expert.weights.folder`."""

    def __init__(self, url: str, syncer: str) -> None:
        """url: a path, or a URL that fsspec opens, with what that needs installed."""
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._path = f"{self._root}/{syncer}"
        self._is_made = False

    def write(self, name: str, content: bytes) -> None:
        """Raises RuntimeError."""
        try:
            if not self._is_made:
                self._files.makedirs(self._path, exist_ok=True)
                self._is_made = True
            self._files.pipe_file(f"{self._path}/{name}", content)
        except OSError as error:
            raise RuntimeError(f"cannot write {self._path}/{name}: {error}") from error

    def read(self, name: str) -> bytes:
        """Raises RuntimeError."""
        try:
            content: bytes = self._files.cat_file(f"{self._path}/{name}")
        except OSError as error:
            raise RuntimeError(f"cannot read {self._path}/{name}: {error}") from error
        return content

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; one that cannot be removed stays, with a warning."""
        for name in names:
            self._remove(f"{self._path}/{name}")

    def remove_all(self) -> None:
        """Remove the files of this syncer, and of all before it that left some."""
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
        folder = Folder(url, "weights-0")
    except (ValueError, ImportError) as error:
        raise RuntimeError(f"fsspec cannot open {url}: {error}") from error
    folder.write("probe", b"probe")
    if folder.read("probe") != b"probe":
        raise RuntimeError(f"{url} does not hold what was written to it")
    folder.remove(["probe"])
