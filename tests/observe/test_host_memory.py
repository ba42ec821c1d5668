"""Limits and kills are read from cgroups of both versions, as far as they can be read."""

from pathlib import Path

import psutil
import pytest

from megatron_rl.observe.host_memory import (
    Kills,
    count_kills,
    describe_kills,
    memory_limit_bytes,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_lowest_limit_above_the_process_counts(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert memory_limit_bytes(tmp_path) == total
    write(tmp_path / "proc/self/cgroup", "0::/slice/job_7/step_0\n")
    job = tmp_path / "sys/fs/cgroup/slice/job_7"
    write(job / "step_0/memory.max", "max\n")
    assert memory_limit_bytes(tmp_path) == total
    write(job / "memory.max", "3000000\n")
    write(job.parent / "memory.max", "4000000\n")
    write(tmp_path / "sys/fs/cgroup/other/memory.max", "5\n")
    assert memory_limit_bytes(tmp_path) == 3_000_000


def test_kills_of_the_job_count_and_not_those_of_its_neighbours(tmp_path: Path) -> None:
    assert count_kills(tmp_path) == Kills(0, 0)
    write(tmp_path / "proc/vmstat", "nr_free_pages 5\noom_kill 9\n")
    write(tmp_path / "proc/self/cgroup", "0::/slice/job_7/step_0\n")
    job = tmp_path / "sys/fs/cgroup/slice/job_7"
    write(job / "step_0/memory.events", "oom 3\noom_kill 1\noom_group_kill 0\n")
    write(job / "memory.events", "oom 3\noom_kill 2\n")
    # Without a limit of its own, its kills are those of jobs in it.
    write(job.parent / "memory.events", "oom_kill 8\n")
    assert count_kills(tmp_path) == Kills(1, 9)
    write(job / "memory.max", "3000000\n")
    assert count_kills(tmp_path) == Kills(2, 9)


def test_cgroups_of_version_1_are_read(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:devices:/a\n4:memory,hugetlb:/a\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/a"
    write(folder / "memory.limit_in_bytes", "2000000\n")
    write(folder.parent / "memory.limit_in_bytes", "9223372036854771712\n")
    write(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert memory_limit_bytes(tmp_path) == 2_000_000
    assert count_kills(tmp_path) == Kills(4, 0)


@pytest.mark.parametrize(
    ("now", "exit_code", "said"),
    [
        (Kills(3, 9), 1, "killed 2 processes of this job for lack of memory"),
        (Kills(1, 9), 1, ""),
        (Kills(1, 9), -11, ""),
        (Kills(1, 9), -9, "killed 4 processes of this host for lack of memory"),
        (Kills(1, 5), -9, ""),
    ],
)
def test_a_death_is_explained_by_what_the_kernel_counts(
    now: Kills, exit_code: int, said: str
) -> None:
    text = describe_kills(Kills(1, 5), now, exit_code)
    assert said in text and bool(said) == bool(text)
