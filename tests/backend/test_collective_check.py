"""Two ranks add up and broadcast: over gloo here, over NCCL in tests/gpu."""

import json
import os
import subprocess
import sys

import pytest

from megatron_rl.backend.collective_check import CollectivesFailed, check_pair
from tests.ports import free_port

pytestmark = pytest.mark.timeout(300)


def test_two_ranks_exchange_and_say_how_fast() -> None:
    found = check_pair("gloo", size_bytes=4 << 20, deadline_s=100)
    assert found.ranks == 2
    assert 0.001 < found.all_reduce_gb_s < 100 and 0.001 < found.broadcast_gb_s < 100


@pytest.mark.exhaustive
def test_ranks_end_themselves_at_the_deadline() -> None:
    with pytest.raises(CollectivesFailed, match="they took longer than 0.01 s"):
        check_pair("gloo", deadline_s=0.01)


@pytest.mark.exhaustive
def test_the_error_of_a_rank_is_told() -> None:
    with pytest.raises(CollectivesFailed, match="negative dimension") as error:
        check_pair("gloo", size_bytes=-4, deadline_s=100)
    assert "longer than" not in str(error.value)


@pytest.mark.exhaustive
def test_torchrun_starts_the_same_ranks_on_each_node() -> None:
    """As docs/schedulers.md says, with two of them on this host."""
    port = free_port()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "-m", "megatron_rl.backend.collective_check", "--collectives=gloo", "--size-bytes=4096",
    ]  # fmt: skip
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    texts = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    [line] = [line for text in texts for line in text.splitlines() if line.startswith("{")]
    assert json.loads(line)["ranks"] == 2
