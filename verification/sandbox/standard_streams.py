"""Files behind the names of the standard streams, such as /dev/stdin, for the programs of a test.

Runs inside the sandbox, in `server.py`. A sandbox has no /proc, which shows the other process of
unit tests, its memory included. So these names lead to files of a small file system of the test.
As with redirected files, each opening of /dev/stdin reads the input from its start.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from verification.sandbox import confinement

FOLDER = "/sandbox/streams"
LINKS = {
    name: f"{FOLDER}/{stream}"
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr"))
    for name in (f"/dev/{stream}", f"/dev/fd/{descriptor}", f"/proc/self/fd/{descriptor}")
}
"""Name of a stream -> its file, which exists while a program runs."""
_INODES = 4
_SLACK_BYTES = 1 << 16
"""Files take whole pages."""


@contextlib.contextmanager
def named_streams(files: list[int], file_bytes: int) -> Iterator[None]:
    """Give a program the names of its streams; then append what it wrote there to its output.

    files: input, output and errors of the program. file_bytes: limit of its largest file.
    """
    stdin, *outputs = files
    size = os.fstat(stdin).st_size
    options = f"size={size + 2 * file_bytes + _SLACK_BYTES},nr_inodes={_INODES},mode=755"
    confinement.mount_tmpfs(FOLDER, options)
    try:
        _fill(stdin, size)
        yield
        for name, output in zip(("stdout", "stderr"), outputs, strict=True):
            _append(f"{FOLDER}/{name}", output)
    finally:
        confinement.unmount(FOLDER)


def _fill(stdin: int, size: int) -> None:
    with open(f"{FOLDER}/stdin", "wb") as file:
        _copy(stdin, file.fileno(), size)
    for name in ("stdout", "stderr"):
        with open(f"{FOLDER}/{name}", "wb"):
            os.chmod(f"{FOLDER}/{name}", 0o666)
    # The tested code may be the owner: modes are what keeps it from the input and the folder.
    os.chmod(f"{FOLDER}/stdin", 0o444)
    os.chmod(FOLDER, 0o555)


def _append(path: str, output: int) -> None:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            # The program may have set this descriptor to append, which the kernel refuses here.
            fcntl.fcntl(output, fcntl.F_SETFL, 0)
            os.lseek(output, 0, os.SEEK_END)
            _copy(file.fileno(), output, size)


def _copy(source: int, target: int, size: int) -> None:
    """Copy a file by the kernel: the server's memory must hold nothing of a test."""
    copied = 0
    while copied < size:
        copied += os.sendfile(target, source, copied, size - copied)
