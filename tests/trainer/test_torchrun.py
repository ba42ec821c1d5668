"""torchrun with a store that listens on the run's address alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.slow(10), pytest.mark.timeout(300)]

RANK = """
import os, psutil
import torch.distributed as dist

dist.init_process_group("gloo")
total = [None] * dist.get_world_size()
dist.all_gather_object(total, (dist.get_rank(), os.environ["MASTER_ADDR"]))
if dist.get_rank() == 0:
    parent = psutil.Process().parent()
    listening = [one for one in parent.net_connections("tcp") if one.status == "LISTEN"]
    print("RANKS", sorted(total), [tuple(one.laddr) for one in listening])
dist.barrier()
# A gloo group that is left to the end of Python may abort the process.
dist.destroy_process_group()
"""


def test_ranks_of_two_nodes_meet_at_one_address_that_alone_listens(tmp_path: Path) -> None:
    (tmp_path / "few_ranks.py").write_text(RANK)
    # Another address of this host than the one that libraries choose by themselves.
    host, port = "127.0.0.3", free_port()
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "megatron_rl.trainer.torchrun", "--nnodes=2",
                f"--nproc-per-node={1 + rank}", "--rdzv-backend=run-address",
                f"--rdzv-endpoint={host}:{port}", f"--rdzv-conf=rank={rank}", "-m", "few_ranks",
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        told = [node.communicate(timeout=200)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    ranks = [(rank, host) for rank in range(3)]
    assert f"RANKS {ranks} {[(host, port)]}" in told[0]
