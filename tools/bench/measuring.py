"""Shared by all benchmarks: command lines, figures, processor time and memory (/proc, Linux)."""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megatron_rl.config.errors import ConfigError, InputError
from tools.bench.children import CACHE, ChildFailed

CORES = 2
PAUSE_S = 2.0
_SAMPLE_S = 2.0
_PIECE_BYTES = 1 << 22
_MOST_FILLED_BYTES = 64 << 30


def parser(doc: str | None, *, quick: str, repeats: str = "") -> argparse.ArgumentParser:
    """A command line with the module's docstring as help, and --quick.

    repeats: help of --repeats; if given, adds --repeats and --work-dir, for `run`.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    if repeats:
        made.add_argument("--repeats", type=int, help=repeats)
        made.add_argument("--work-dir", type=Path, help="new folder for logs and samples")
    return made


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[Path, list[int]], dict[str, Any]],
    *,
    cores: int | None = None,
) -> int:
    """Measure in a new folder and report the figures; returns the exit code.

    measure: takes the folder for logs and samples, and the allowed cores. cores: their number;
    None: all. SIGTERM becomes SystemExit, which ends children too.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, chosen)
    folder = options.work_dir or CACHE / "bench" / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    if folder.exists():
        raise SystemExit(f"--work-dir {folder} exists already: give the name of a new folder")
    folder.mkdir(parents=True)
    say(f"logs and samples: {folder}")
    try:
        found = measure(folder.resolve(), chosen)
    except (ChildFailed, ConfigError, InputError, OSError) as error:
        say(f"{error}\nall logs: {folder}")
        return 1
    report({"mode": "quick" if options.quick else "full", "cores": len(chosen)} | found)
    return 0


def say(text: str) -> None:
    """Show progress on stderr."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def show(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table: a line per row, a column per figure of the first row."""
    columns = {name: max(8, len(name)) for name in next(iter(rows.values()))}
    print(f"\n{title:12} " + " ".join(f"{name:>{width}}" for name, width in columns.items()))
    for label, row in rows.items():
        cells = (f"{row[name]:{width}.3f}" for name, width in columns.items())
        print(f"{label:12} " + " ".join(cells), flush=True)


def report(found: dict[str, Any]) -> None:
    """Print the figures as one JSON object on a line, floats with four digits."""
    print(json.dumps(rounded(found)), flush=True)


def rounded(value: Any) -> Any:
    """The tree with floats of four significant digits."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def over(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Median of the ratios of values measured in the same repeat."""
    return statistics.median(a / b for a, b in zip(tops, bottoms, strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    """Percentile, never beyond the largest value."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def rotations(names: Sequence[str], repeats: int) -> list[list[str]]:
    """Order of each repeat: starts one name later each time, so that drift of the machine affects
    all."""
    starts = [repeat % len(names) for repeat in range(repeats)]
    return [[*names[start:], *names[:start]] for start in starts]


@contextlib.contextmanager
def used_memory() -> Iterator[None]:
    """Fill free memory with a file's pages, as on a machine that has run for long.

    A virtual machine may give free pages back to its host. The first touch of each then costs
    microseconds, and writers of files would pay for it.
    """
    piece = bytearray(_PIECE_BYTES)
    with tempfile.TemporaryFile() as file:
        # Hosts with more memory keep their free pages, and reading takes a second for 3 GB.
        size = min(psutil.virtual_memory().available, _MOST_FILLED_BYTES)
        file.truncate(size)
        for _ in range(0, size, _PIECE_BYTES):
            file.readinto(piece)  # type: ignore[attr-defined]
        yield


def busy_share(cores: Sequence[int], seconds: float = PAUSE_S) -> float:
    """Busy share of the cores' time in [0, 1] over the next `seconds`.

    Benchmarks call it while idle: on a busy machine their figures mean little.
    """
    before_s, started = _busy_s(cores), time.monotonic()
    time.sleep(seconds)
    available_s = len(cores) * (time.monotonic() - started)
    # The kernel counts in ticks, so the quotient can leave [0, 1] slightly.
    return min(1.0, max(0.0, (_busy_s(cores) - before_s) / available_s))


def _busy_s(cores: Sequence[int]) -> float:
    by_core = psutil.cpu_times(percpu=True)
    return sum(sum(by_core[i]) - by_core[i].idle - by_core[i].iowait for i in cores)


class ProcessTimes(NamedTuple):
    """Processor time and peak memory of a process so far."""

    cpu_s: float
    """User and system time of all threads."""
    main_s: float
    """User and system time of the main thread."""
    peak_rss_mb: float


def read_times(pid: int) -> ProcessTimes:
    """Times and memory of a running process. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    main = next(thread for thread in process.threads() if thread.id == pid)
    times = process.cpu_times()
    return ProcessTimes(
        times.user + times.system,
        main.user_time + main.system_time,
        status_bytes("VmHWM", pid) / 1e6,
    )


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A size in /proc/PID/status: VmRSS (memory) or VmHWM (peak memory)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(key))


def start_peak() -> None:
    """Reset VmHWM of this process to its VmRSS. See proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


class PeakMemory:
    """While entered, a thread samples the memory of all sub-processes, as PSS.

    PSS divides a shared page by the number of its sharers.
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
    """PSS of a process; 0 when it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return psutil.Process(pid).memory_full_info().pss
    return 0
