"""Failure notes of processes for the launcher: the earliest note is the cause.

Imported by every process. When a rank fails, its closed connections make other ranks fail, which
may even end before it. So a process writes the note when the error leaves its main loop, before it
closes anything.
"""

import logging
import os
import time
from pathlib import Path

import msgspec

from megatron_rl.protocol.whole_file import write_whole

FAILURE_VARIABLE = "MEGATRON_RL_FAILURE_NOTE"
"""Environment variable, set by the launcher: path of the note, without suffix."""
FAILURES = "failures"
"""Folder of the notes, below RUN/logs."""
LAUNCHER = "launch"
"""Role of the launcher, in the name of its note."""
_ENDING = ".json"
_RANK = ".rank-"

log = logging.getLogger(__name__)


class Failure(msgspec.Struct, frozen=True):
    """The error that ended a process."""

    time_s: float
    """time.time() of the note."""
    who: str
    """Role, and rank if the role has several."""
    exit_code: int
    text: str
    """The message of an error that a person can fix, else the traceback."""
    pid: int


def write_failure(exit_code: int, text: str) -> None:
    """Note the error that ends this process, unless it has written a note."""
    target = os.environ.get(FAILURE_VARIABLE)
    if not target:
        return
    path, rank = Path(target), os.environ.get("RANK")
    who = path.name if rank is None else f"{path.name}, rank {rank}"
    path = path.with_name(path.name + ("" if rank is None else f"{_RANK}{rank}") + _ENDING)
    known = _read(path)
    if known is None or known.pid != os.getpid():
        _write(path, who, exit_code, text)


def write_failure_of_launcher(folder: Path, exit_code: int, text: str) -> None:
    """Note the error with which the launcher of the first node ends the run."""
    _write(folder / f"{LAUNCHER}{_ENDING}", LAUNCHER, exit_code, text)


def _write(path: Path, who: str, exit_code: int, text: str) -> None:
    failure = Failure(time.time(), who, exit_code, text, os.getpid())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(failure))
    except OSError as error:  # such as the full disk that ends the process
        log.warning("cannot note the error that follows in %s: %s", path, error)


def first_failure(folder: Path, since_s: float) -> Failure | None:
    """The earliest note in `folder` since time.time() `since_s`."""
    notes = (_read(path) for path in sorted(folder.glob(f"*{_ENDING}")))
    recent = [note for note in notes if note is not None and note.time_s >= since_s]
    return min(recent, key=lambda note: note.time_s, default=None)


def clear_failures(folder: Path, role: str) -> None:
    """Remove the notes of a role before it starts."""
    for path in (folder / f"{role}{_ENDING}", *folder.glob(f"{role}{_RANK}*{_ENDING}")):
        path.unlink(missing_ok=True)


def _read(path: Path) -> Failure | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Failure)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
