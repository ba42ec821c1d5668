"""Files of a weight sync, in a folder or an object store.

Used by trainer ranks and engine ranks, and by the launcher's checks; needs fsspec alone.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import fsspec

log = logging.getLogger(__name__)

_PROBE = "weights-0/probe"
"""A file of a syncer that there is not: `remove_all` takes what may be left of it."""

_SYNCERS = re.compile(r"weights-\d+")
"""Names of syncers, of this run and of earlier ones."""


@contextmanager
def _failing_with(text: str) -> Iterator[None]:
    """Raise RuntimeError, whatever the library of a store raises."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 fsspec passes on botocore's errors: no OSErrors
        raise RuntimeError(f"{text}: {type(error).__name__}: {error}") from error


class Folder:
    """Files of syncers below `expert.weights.folder`, by the names SYNCER/FILE."""

    def __init__(self, url: str) -> None:
        """url: a path, or a URL that an installed package opens. Raises RuntimeError."""
        with _failing_with(f"fsspec cannot open {url}"):
            self._files, self._root = fsspec.core.url_to_fs(url)
        self._made: set[str] = set()
        """Folders of syncers that this process has made."""

    def write(self, name: str, content: bytes) -> None:
        """Raises RuntimeError."""
        path, syncer = f"{self._root}/{name}", name.partition("/")[0]
        with _failing_with(f"cannot write {path}"):
            if syncer not in self._made:
                self._files.makedirs(f"{self._root}/{syncer}", exist_ok=True)
                self._made.add(syncer)
            self._files.pipe_file(path, content)

    def read(self, name: str) -> bytes:
        """Raises RuntimeError."""
        path = f"{self._root}/{name}"
        with _failing_with(f"cannot read {path}"):
            content: bytes = self._files.cat_file(path)
        return content

    def remove(self, names: Sequence[str]) -> None:
        """Remove files and folders; one that cannot be removed stays, with a warning."""
        for path in (f"{self._root}/{name}" for name in names):
            try:
                with _failing_with(f"{path} stays"):
                    self._files.rm(path, recursive=True)
            except RuntimeError as error:
                log.warning("%s", error)

    def remove_all(self) -> None:
        """Remove the files of all syncers, of this run and of earlier ones that left some."""
        found: list[str] = []
        try:
            with _failing_with(f"old files may stay in {self._root}"), suppress(FileNotFoundError):
                found = self._files.ls(self._root, detail=False, refresh=True)
        except RuntimeError as error:
            log.warning("%s", error)
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        self.remove([name for name in names if _SYNCERS.fullmatch(name)])


def check_folder(url: str) -> None:
    """Write, read and remove a file there. Raises RuntimeError."""
    folder = Folder(url)
    folder.write(_PROBE, b"probe")
    if folder.read(_PROBE) != b"probe":
        raise RuntimeError(f"{url} does not hold what was written to it")
    folder.remove([_PROBE])
