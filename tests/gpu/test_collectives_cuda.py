"""`megatron-rl doctor --nccl`. The test is a row of docs/gpu-evidence.md."""

from collections.abc import Callable

import pytest
import torch

from megatron_rl.backend.collective_check import check_pair

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_exchange_over_nccl(record_property: Callable[[str, object], None]) -> None:
    found = check_pair()
    record_property(
        "figure",
        f"all_reduce {found.all_reduce_gb_s:.1f} GB/s, broadcast {found.broadcast_gb_s:.1f} GB/s",
    )
    assert found.ranks == 2 and found.all_reduce_gb_s > 1
