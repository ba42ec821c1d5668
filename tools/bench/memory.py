"""The most memory that a variant's processes held at once.

Used by tools.bench.end_to_end around each run.
"""

import contextlib
import re
import threading
from pathlib import Path

import psutil

SAMPLE_S = 2.0
"""Reading a process' pages takes milliseconds of a core: often enough for steps of many seconds."""
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.M)


class PeakMemory:
    """Samples the processes that descend from this one while it is entered.

    One thread of its own, which `__exit__` ends; PSS counts a page that n processes share as 1/n of
    a page of each, so that the sum is what would be free without them.
    """

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self.peak_bytes = 0
        self._sample_s = sample_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._sample_s):
            self.peak_bytes = max(self.peak_bytes, tree_bytes())


def tree_bytes() -> int:
    """PSS of all processes that descend from this one."""
    return sum(pss_bytes(child.pid) for child in psutil.Process().children(recursive=True))


def pss_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided among those that share them; 0: it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return int(found[1]) << 10 if found else 0
    return 0
