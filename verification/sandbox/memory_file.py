"""Anonymous memory files that carry a sandboxed program's input and output.

Used by a grading process. A program gets only the descriptor; the file has no name.
"""

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator

from verification.verdict import GradingError


def make_file(content: bytes | None = None) -> int:
    """Descriptor of a new file; a file created with content (even empty) is sealed."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size = len(content or b"")
    if limit != resource.RLIM_INFINITY and size > limit:
        raise GradingError(f"a test of {size} bytes exceeds this process's RLIMIT_FSIZE of {limit}")
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if content is not None:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def read_file(descriptor: int, limit: int) -> bytes:
    """The first `limit` bytes of a file."""
    return os.pread(descriptor, limit, 0)


@contextlib.contextmanager
def closing(*descriptors: int) -> Iterator[list[int]]:
    """Close descriptors at the end."""
    try:
        yield list(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
