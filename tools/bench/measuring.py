"""What all benchmarks share: command lines, figures, processor time and memory.

Runs in the process of a benchmark. Reads /proc, so Linux only.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tools.bench.children import CACHE

CORES = 2
PAUSE_S = 2.0
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_SAMPLE_S = 2.0
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.M)


def parser(doc: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A command line with the module's docstring as help, and --quick."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    return made


def begin(name: str, work_dir: Path | None, cores: int | None = None) -> tuple[Path, list[int]]:
    """Prepare a benchmark: returns its new folder for logs and samples, and its cores.

    cores: how many this process and its children may use; None: all. SIGTERM becomes SystemExit,
    so that running children are ended too.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, chosen)
    folder = work_dir or CACHE / "bench" / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    if folder.exists():
        raise SystemExit(f"--work-dir {folder} exists already: give the name of a new folder")
    folder.mkdir(parents=True)
    say(f"logs and samples: {folder}")
    return folder.resolve(), chosen


def say(text: str) -> None:
    """Show progress on stderr."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def report(found: dict[str, Any]) -> None:
    """Print the figures as one JSON object, floats with four digits."""
    print(json.dumps(rounded(found)), flush=True)


def rounded(value: Any) -> Any:
    """The same tree with four significant digits of every float."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def over(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Median of the ratios of values measured in the same repeat."""
    return statistics.median(a / b for a, b in zip(tops, bottoms, strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    """Value that `percent` of a hundred do not exceed; never beyond the largest value."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def rotations(names: Sequence[str], repeats: int) -> list[list[str]]:
    """Order of each repeat: starts one name later each time, so that drift affects all."""
    turns = [repeat % len(names) for repeat in range(repeats)]
    return [[*names[turn:], *names[:turn]] for turn in turns]


def busy_share(cores: Sequence[int], seconds: float = PAUSE_S) -> float:
    """Share of the cores' time in [0, 1] that was in use in the `seconds` from now on.

    Benchmarks call it while they run nothing: on a busy machine their figures mean little.
    """
    before_s, started = _busy_s(cores), time.monotonic()
    time.sleep(seconds)
    available_s = len(cores) * (time.monotonic() - started)
    # The kernel counts in ticks, so the quotient can leave [0, 1] by a little.
    return min(1.0, max(0.0, (_busy_s(cores) - before_s) / available_s))


def _busy_s(cores: Sequence[int]) -> float:
    by_core = psutil.cpu_times(percpu=True)
    return sum(sum(by_core[i]) - by_core[i].idle - by_core[i].iowait for i in cores)


def shares_by_session() -> bool:
    """Whether Linux divides the cores among sessions first (autogroup), not among processes."""
    return AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1"


class ProcessTimes(NamedTuple):
    """Processor time and memory of a process so far."""

    cpu_s: float
    """User and system time of all threads."""
    main_s: float
    """The same of the main thread."""
    rss_mb: float
    peak_rss_mb: float


def read_times(pid: int) -> ProcessTimes:
    """Times and memory of a running process. Raises FileNotFoundError where it has ended."""
    rss, peak = (status_bytes(key, pid) / 1e6 for key in ("VmRSS", "VmHWM"))
    stats = (Path(f"/proc/{pid}/stat"), Path(f"/proc/{pid}/task/{pid}/stat"))
    return ProcessTimes(*map(_cpu_s, stats), rss, peak)


def _cpu_s(stat: Path) -> float:
    # The program's name, in parentheses, may hold spaces.
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A size in /proc/PID/status: VmRSS (memory now) or VmHWM (its peak)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(key))


def start_peak() -> None:
    """Let VmHWM of this process start again. See proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


class PeakMemory:
    """While entered, a thread samples the memory (PSS) of all processes that descend from this one.

    PSS counts a page that n processes share as 1/n of a page of each.
    """

    def __init__(self, sample_s: float = _SAMPLE_S) -> None:
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
            children = psutil.Process().children(recursive=True)
            self.peak_bytes = max(self.peak_bytes, sum(pss_bytes(child.pid) for child in children))


def pss_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided among the sharers; 0 when it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return int(found[1]) << 10 if found else 0
    return 0
