"""Threads that write log lines and metrics rows, so that event loops never wait for the disk.

Used by the queue, generators and verifiers. A run folder on Lustre or NFS may hang for a minute,
which must not look like silence of a process.

| thread           | does                                     | waits for     | ends            |
|------------------|------------------------------------------|---------------|-----------------|
| the caller       | puts lines; drops and counts those over  | nothing       | `close` or exit |
|                  | WAITING_LINES                            |               |                 |
| `metrics`, `log` | take and write lines                     | the next line | `close` or exit |

The threads share only SimpleQueues (`record_files.py` says why).
"""

import atexit
import logging
import logging.handlers
import queue
import threading
from pathlib import Path
from typing import Any

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import LIMIT_S, WriteFailed
from megatron_rl.protocol.metrics import JsonlWriter

log = logging.getLogger(__name__)

WAITING_LINES = 10_000
CLOSE_S = 30.0
"""Limit for writing the waiting lines at the end."""


class _BoundedLine(queue.SimpleQueue[Any]):
    """Drops and counts items over WAITING_LINES."""

    dropped = 0

    def put_nowait(self, item: Any) -> None:
        if item is not None and self.qsize() >= WAITING_LINES:
            self.dropped += 1
            return
        super().put_nowait(item)


class BackgroundJsonlWriter(JsonlWriter, Closing):
    """A `JsonlWriter` that writes in a thread, which waits for room on a full disk."""

    def __init__(self, path: Path, source: str, *, limit_s: float = LIMIT_S) -> None:
        super().__init__(path, source, limit_s=limit_s)
        self._line = _BoundedLine()
        """None ends the thread."""
        self._failure: WriteFailed | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _append(self, row: bytes) -> None:
        """Queue a row. Raises WriteFailed after a row that could not be written."""
        if self._failure is not None:
            raise self._failure
        self._line.put_nowait(row)

    def _run(self) -> None:
        try:
            while (row := self._line.get()) is not None:
                super()._append(row)
        except WriteFailed as error:
            log.error("%s", error)
            self._failure = error

    def close(self) -> None:
        """Write all waiting rows and close the file."""
        self._line.put_nowait(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("%d metrics rows were lost: %s is slow", self._line.qsize(), self._path)
            return
        super().close()
        if self._line.dropped:
            log.warning("%d metrics rows were lost: %s is slow", self._line.dropped, self._path)


def handle_in_background(handlers: list[logging.Handler]) -> logging.Handler:
    """A handler that passes records to these handlers in a thread, which ends with the process."""
    line = _BoundedLine()
    thread = threading.Thread(target=_pass_on, args=(line, handlers), name="log", daemon=True)
    thread.start()

    def end() -> None:
        line.put_nowait(None)
        thread.join(CLOSE_S)

    atexit.register(end)
    handler = logging.handlers.QueueHandler(line)
    # The formatter of `logging.basicConfig` would add a second prefix.
    handler.setFormatter(logging.Formatter())
    return handler


def _pass_on(line: _BoundedLine, handlers: list[logging.Handler]) -> None:
    told = 0
    while (record := line.get()) is not None:
        for handler in handlers:
            handler.handle(record)
        if line.dropped > told:
            told = line.dropped
            log.warning("%d log lines were lost so far: the log's disk is slow", told)
