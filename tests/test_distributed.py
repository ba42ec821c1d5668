"""run_ranks returns every rank's result, and never waits for ranks that cannot come."""

import multiprocessing
import os
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.backend.environment import ranks_environment
from tests import distributed
from tests.distributed import RanksFailed, may_fork, run_ranks, stop_server

IMPORTED_BY = os.getpid()


def importer_and_self() -> tuple[int, int]:
    return IMPORTED_BY, os.getpid()


def add_ranks(start: float) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def fail_on_last_rank() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 had enough")
    dist.barrier()


def sleep() -> None:
    time.sleep(100)


def start_child() -> int:
    child = multiprocessing.get_context("spawn").Process(target=sleep)
    child.start()
    assert child.pid is not None
    return child.pid


@pytest.mark.parametrize("forks", [True, False])
def test_results_come_in_the_order_of_ranks(forks: bool) -> None:
    assert run_ranks(add_ranks, 2, 2.0, forks=forks) == [5.0, 5.0]


def test_a_test_file_is_imported_once_for_the_ranks_of_all_calls() -> None:
    calls = [
        *run_ranks(importer_and_self, 2, forks=True),
        *run_ranks(importer_and_self, 2, forks=True),
    ]
    importers, ranks = zip(*calls, strict=True)
    assert len(set(importers)) == 1 and len(set(ranks)) == 4
    assert {os.getpid(), *ranks}.isdisjoint(importers)


def test_ranks_that_may_not_fork_import_everything_themselves() -> None:
    """As on CUDA, where what was imported before a fork would have talked to the driver."""
    calls = run_ranks(importer_and_self, 2, forks=False)
    assert all(importer == rank for importer, rank in calls)
    assert len({rank for _, rank in calls}) == 2


def test_ranks_come_after_the_thread_in_which_the_server_was_started() -> None:
    """As tests of engines call it, from a thread of the event loop."""
    stop_server()
    thread = threading.Thread(target=run_ranks, args=(importer_and_self, 1))
    thread.start()
    thread.join()
    ended_by = time.monotonic() + 60
    while not distributed._server.has_ended and time.monotonic() < ended_by:
        time.sleep(0.01)
    assert distributed._server.has_ended
    assert len(run_ranks(importer_and_self, 2)) == 2


def variables() -> tuple[str | None, str, list[str]]:
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    # Of a rank that the launcher starts on GPUs.
    wanted = ranks_environment("cuda", 1, given={})
    assert wanted.keys() <= os.environ.keys()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    return os.environ.get("SET_LATER"), os.environ["OMP_NUM_THREADS"], path


def test_ranks_that_are_started_anew_have_the_callers_environment_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may have been started under another one, which hid a GPU."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    path = [str(distributed.ROOT), "/of/the/caller"]
    assert run_ranks(variables, 1, forks=False) == [(None, "1", path)]
    monkeypatch.setenv("SET_LATER", "yes")
    assert run_ranks(variables, 1, forks=False) == [("yes", "1", path)]
    assert run_ranks(variables, 1, forks=False, env={"SET_LATER": "no"}) == [("no", "1", path)]


def test_ranks_fork_where_there_is_no_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_cpu in (True, False):
        may_fork.cache_clear()
        monkeypatch.setattr(sglang_cpu, "is_needed", lambda is_cpu=is_cpu: is_cpu)
        [(importer, rank)] = run_ranks(importer_and_self, 1)
        assert (importer != rank) == is_cpu
    may_fork.cache_clear()


@pytest.mark.parametrize("forks", [True, False])
def test_failing_rank_ends_the_others(forks: bool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 had enough"):
        run_ranks(fail_on_last_rank, 2, forks=forks)


def test_ranks_that_hang_miss_the_deadline() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] missed the 1 s deadline") as caught:
        run_ranks(sleep, 2, timeout_s=1)
    # Each says where it was.
    assert str(caught.value).count('test_distributed.py", line') == 2
    assert str(caught.value).count(" in sleep") == 2


def test_children_of_ranks_end_with_them() -> None:
    left = [psutil.Process(pid) for pid in run_ranks(start_child, 2) if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
