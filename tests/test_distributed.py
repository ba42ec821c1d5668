"""run_ranks returns every rank's result, and never waits for ranks that cannot come."""

import multiprocessing
import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksFailed, run_ranks

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


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(add_ranks, 2, 2.0) == [5.0, 5.0]


def test_a_test_file_is_imported_once_for_the_ranks_of_all_calls() -> None:
    calls = run_ranks(importer_and_self, 2) + run_ranks(importer_and_self, 2)
    importers, ranks = zip(*calls, strict=True)
    assert len(set(importers)) == 1 and len(set(ranks)) == 4
    assert {os.getpid(), *ranks}.isdisjoint(importers)


def test_failing_rank_ends_the_others() -> None:
    with pytest.raises(RanksFailed, match="rank 1 had enough"):
        run_ranks(fail_on_last_rank, 2)


def test_ranks_that_hang_miss_the_deadline() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] missed the 1 s deadline"):
        run_ranks(sleep, 2, timeout_s=1)


def test_children_of_ranks_end_with_them() -> None:
    left = [psutil.Process(pid) for pid in run_ranks(start_child, 2) if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive
