"""Names that a joining launcher claims for its node and replicas: RUN/joined/NAME, one file each.

Used by the launcher. The file system creates each file for one claimant alone. A name whose
claimant was killed stays taken until the run starts again.
"""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import PRIVATE_FILE, PRIVATE_FOLDER

FOLDER = "joined"
_TRIES = 100
"""Other launchers that may claim the same numbers at the same moment."""


def clear_claims(run_dir: Path) -> None:
    """Forget the claims of an earlier start of the run. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(run_dir / FOLDER)


@contextlib.contextmanager
def claimed(run_dir: Path, kind: str, *, count: int, first: int) -> Iterator[range]:
    """Claim `count` numbers in a row for KIND-NUMBER, at least `first`; freed with the block.

    Raises InputError.
    """
    folder = run_dir / FOLDER
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    for _ in range(_TRIES):
        start = max([first, *(number + 1 for number in _taken(folder, kind))])
        numbers = range(start, start + count)
        with contextlib.ExitStack() as stack:
            if all(_claim(folder / f"{kind}-{number}", stack) for number in numbers):
                yield numbers
                return
    raise InputError(f"{_TRIES} others took the names in {folder} first: try again")


def _taken(folder: Path, kind: str) -> list[int]:
    found = (re.fullmatch(rf"{kind}-(\d+)", path.name) for path in folder.iterdir())
    return [int(one[1]) for one in found if one]


def _claim(path: Path, stack: contextlib.ExitStack) -> bool:
    """Create a file that the stack removes; False if it is there."""
    claimant = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    except FileExistsError:
        return False
    with open(descriptor, "w") as file:
        file.write(claimant)
    stack.callback(_free, path, claimant)
    return True


def _free(path: Path, claimant: str) -> None:
    """Remove our claim; a later start of the run may have given the name to another launcher."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text() == claimant:
            path.unlink()
