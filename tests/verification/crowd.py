"""A crowded host for tests: one core, shared with processes that never stop computing."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def crowded(processes: int) -> Iterator[None]:
    """Have this thread, and all that it starts, share one core with so many busy processes."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        for _ in range(processes):
            # A session each: where Linux shares cores by session, one for all would be one process.
            busy = subprocess.Popen(
                [sys.executable, "-c", "while True: pass"], start_new_session=True
            )
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        yield
