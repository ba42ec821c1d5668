"""run_ranks returns every rank's result, and never waits for ranks that cannot come."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RanksFailed, run_ranks


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


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(add_ranks, 2, 2.0) == [5.0, 5.0]


def test_failing_rank_ends_the_others() -> None:
    with pytest.raises(RanksFailed, match="rank 1 had enough"):
        run_ranks(fail_on_last_rank, 2)


def test_ranks_that_hang_miss_the_deadline() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] missed the 1 s deadline"):
        run_ranks(sleep, 2, timeout_s=1)
