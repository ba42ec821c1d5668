"""How busy the benchmark's cores are while it runs nothing itself, and how Linux shares them.

Used by tools.bench.end_to_end between the runs: on a machine that others
use, the figures mean little, and the result says so. (What a run itself used is not subtracted from
a busy machine instead: the time of an engine's grandchildren does not reach us.)
"""

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def busy_share(cores: Sequence[int], seconds: float) -> float:
    """Share of the cores' time in [0, 1] that was in use in the `seconds` from now on."""
    before_s = _busy_s(cores)
    started = time.monotonic()
    time.sleep(seconds)
    available_s = len(cores) * (time.monotonic() - started)
    # The kernel counts in ticks, so that the quotient may end up outside by a little.
    return min(1.0, max(0.0, (_busy_s(cores) - before_s) / available_s))


def shares_by_session() -> bool:
    """Whether Linux divides the cores among sessions first (autogroup), and not among processes."""
    return AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1"


def _busy_s(cores: Sequence[int]) -> float:
    by_core = psutil.cpu_times(percpu=True)
    return sum(sum(by_core[i]) - by_core[i].idle - by_core[i].iowait for i in cores)
