"""tools.soak names what grows in which role."""

import json
import sys

import pytest

from tools import soak

# A launcher with a queue that opens a file and takes 2 MiB every 0.1 s; SIGTERM ends both.
LAUNCHER = """
import signal, subprocess, sys
leaks = "kept = []\\nwhile True: kept += [open('/dev/null'), b'x' * 2**21]; time.sleep(0.1)"
command = [sys.executable, "-c", "import time; " + leaks, "megatron_rl.rollout_queue.server"]
child = subprocess.Popen(command)
def end(number, frame):
    child.kill()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
child.wait()
"""


@pytest.mark.timeout(300)
def test_a_role_that_keeps_files_and_memory_is_not_flat() -> None:
    found, code = soak.soak([sys.executable, "-c", LAUNCHER], minutes=0.08, every_s=0.2)
    assert code == 143 and not found["flat"]
    queue, launcher = found["roles"]["queue"], found["roles"]["launcher"]
    # Ten files a second, at most.
    assert not queue["files"]["flat"] and 18_000 < queue["files"]["per_hour"] <= 36_500
    assert not queue["rss_mib"]["flat"] and queue["rss_mib"]["last"] > queue["rss_mib"]["first"]
    assert queue["threads"]["flat"] and launcher["files"]["flat"] and launcher["rss_mib"]["flat"]
    json.dumps(found)


def test_the_slope_is_of_the_second_half_alone() -> None:
    # 4, 8, 12, 16 MiB while it warms up, then one MiB in a hour.
    rss = [4, 8, 12, 16, *(100 + hour for hour in range(8))]
    samples = [
        (float(hour), {"rank": {"rss_mib": float(value), "files": 3, "threads": 1, "processes": 1}})
        for hour, value in enumerate([*rss[:4], *[90.0] * 4, *rss[4:]])
    ]
    rank = soak.report(samples)["roles"]["rank"]
    # 5 MiB and 2 % of the median of 100 and 101.
    assert rank["rss_mib"] == {
        "per_hour": 1.0, "first": 100.5, "last": 106.5, "bound": 7.0, "flat": True,
    }  # fmt: skip
    assert rank["files"]["per_hour"] == 0 and rank["files"]["flat"]
    assert not soak.judge("files", [0.0, 1.0, 2.0], [10, 13, 16])["flat"]


def test_too_few_samples_give_no_verdict() -> None:
    with pytest.raises(SystemExit, match="1 samples after the warm-up; at least 8"):
        soak.report([(0.0, {})])
