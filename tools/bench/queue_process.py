"""Processor time and memory of a running process, as Linux counts them.

Used by tools.bench.queue.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

_RSS = re.compile(r"^Vm(HWM|RSS):\s+(\d+) kB", re.M)


class ProcessTimes(NamedTuple):
    """Of a process so far."""

    cpu_s: float
    """User and system time of all its threads."""
    main_s: float
    """Of its main thread."""
    rss_mb: float
    """Memory now."""
    peak_rss_mb: float


def read_times(pid: int) -> ProcessTimes:
    """Of a process that runs. Raises FileNotFoundError where it has ended."""
    sizes = dict(_RSS.findall(Path(f"/proc/{pid}/status").read_text()))
    return ProcessTimes(
        _cpu_s(Path(f"/proc/{pid}/stat")),
        _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat")),
        rss_mb=int(sizes["RSS"]) * 1024 / 1e6,
        peak_rss_mb=int(sizes["HWM"]) * 1024 / 1e6,
    )


def _cpu_s(stat: Path) -> float:
    # The name of the program, in parentheses, may hold spaces.
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
