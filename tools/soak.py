"""Runs a run for a given time and says what grows in its processes: `python -m tools.soak ...`.

    python -m tools.soak --config FILE --run-dir DIR --minutes 60 train.steps=100000

Every --every-s seconds it notes resident memory, open files, threads and processes, summed over the
processes of each role (the roles of tools.chaos). At the end it stops the run by SIGTERM, as a
scheduler would, and prints one JSON line. The first half of the time is warm-up. For the rest the
line has, a figure: its slope per hour by least squares, its medians of the first and the last
quarter, and whether it is flat. Exit code: 0 when all is flat and the run ended well, else 1.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression, median

import psutil

from tools.chaos import PROGRAM, processes

BOUNDS = {"rss_mib": 5.0, "files": 2.0, "threads": 1.0, "processes": 1.0}
"""Largest slope of a role per hour that counts as flat; for memory plus `_RSS_SHARE`."""
_RSS_SHARE = 0.02
"""Of the first median, per hour: an allocator still takes some after the warm-up."""
_STOP_S = 300.0
"""For the checkpoint at the end."""
_STOPPED_WELL = 128 + signal.SIGTERM
_FEWEST = 8
"""Samples after the warm-up; fewer give no slope."""


def measure(launcher: int) -> dict[str, dict[str, float]]:
    """The sums of each role now: role -> figure -> value, without processes that end meanwhile."""
    found: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(BOUNDS, 0.0))
    for role, process in [("launcher", psutil.Process(launcher)), *processes(launcher)]:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            now = {
                "rss_mib": process.memory_info().rss / 2**20, "files": process.num_fds(),
                "threads": process.num_threads(), "processes": 1.0,
            }  # fmt: skip
            for figure, value in now.items():
                found[role][figure] += value
    return dict(found)


def judge(figure: str, hours: Sequence[float], values: Sequence[float]) -> dict[str, float | bool]:
    """Slope per hour, medians of the first and the last quarter, and whether it is flat."""
    quarter = max(1, len(values) // 4)
    first, last = median(values[:quarter]), median(values[-quarter:])
    slope = linear_regression(hours, values).slope
    bound = BOUNDS[figure] + (_RSS_SHARE * first if figure == "rss_mib" else 0.0)
    return {
        "per_hour": round(slope, 2), "first": round(first, 1), "last": round(last, 1),
        "bound": round(bound, 1), "flat": slope <= bound,
    }  # fmt: skip


def report(samples: Sequence[tuple[float, dict[str, dict[str, float]]]]) -> dict[str, object]:
    """The line of a soak, from (hours, what `measure` returned) of all samples."""
    kept = samples[len(samples) // 2 :]
    if len(kept) < _FEWEST:
        raise SystemExit(f"{len(kept)} samples after the warm-up; at least {_FEWEST} are needed")
    hours, last = [hour for hour, _ in kept], kept[-1][1]
    roles = {
        role: {
            figure: judge(figure, hours, [sums.get(role, {}).get(figure, 0.0) for _, sums in kept])
            for figure in BOUNDS
        }
        for role in sorted(last)
    }
    flat = all(one["flat"] for figures in roles.values() for one in figures.values())
    return {"hours": round(hours[-1], 3), "samples": len(kept), "flat": flat, "roles": roles}


def soak(command: list[str], minutes: float, every_s: float) -> tuple[dict[str, object], int]:
    """The report of a run that is stopped after some minutes, and its exit code."""
    began = time.monotonic()
    samples: list[tuple[float, dict[str, dict[str, float]]]] = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) as launcher:
        try:
            while time.monotonic() < began + 60 * minutes and launcher.poll() is None:
                samples.append(((time.monotonic() - began) / 3600, measure(launcher.pid)))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(every_s)
            launcher.terminate()
            launcher.wait(_STOP_S)
        finally:
            # The second signal ends the run at once.
            launcher.terminate()
    return report(samples), launcher.returncode


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    given = parser.parse_intermixed_args(arguments)
    run = ["run", "--config", given.config, "--run-dir", str(given.run_dir), *given.overrides]
    found, code = soak([*PROGRAM, *run], given.minutes, given.every_s)
    print(json.dumps(found | {"exit_code": code}))
    return 0 if found["flat"] and code == _STOPPED_WELL else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A signal ends the run too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
