"""Ranks that add up and broadcast a tensor, started by torchrun.

`megatron-rl doctor --nccl` starts two on this host; docs/schedulers.md says how nodes start them.
Each rank ends itself at the deadline, because a call into NCCL may never return.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from megatron_rl.backend.environment import collective_environment, ranks_environment
from megatron_rl.protocol.process import die_with_parent

DEADLINE_S = 120.0
SIZE_BYTES = 256 << 20
_REPEATS = 5
_START_S = 60.0
"""For imports, and for torchrun to end the other rank."""
_LAST_CHARS = 6000
_DEVICES = {"nccl": "cuda", "gloo": "cpu"}


class CollectivesFailed(RuntimeError):
    """A rank failed, computed a wrong sum, or missed the deadline; the text has the output."""


@dataclass(frozen=True)
class Figures:
    """What rank 0 measured: GB/s (10^9 bytes) of each rank's link, as nccl-tests counts them."""

    ranks: int
    all_reduce_gb_s: float
    broadcast_gb_s: float


def check_pair(
    collectives: str = "nccl", *, size_bytes: int = SIZE_BYTES, deadline_s: float = DEADLINE_S
) -> Figures:
    """Run two ranks on this host, with the variables of trainer ranks. Raises CollectivesFailed."""
    variables = ranks_environment(_DEVICES[collectives], 2)
    variables |= collective_environment("127.0.0.1", deadline_s)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", __name__, "--collectives", collectives),
        *("--size-bytes", str(size_bytes), "--deadline-s", str(deadline_s)),
    ]
    late = f"they took longer than {deadline_s:g} s"
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True,
            timeout=deadline_s + _START_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CollectivesFailed(late) from error
    if done.returncode:
        why = f"{late}\n" if signal.SIGALRM.name in done.stderr else ""
        raise CollectivesFailed(why + done.stderr[-_LAST_CHARS:])
    [line] = [line for line in done.stdout.splitlines() if line.startswith('{"ranks"')]
    return Figures(**json.loads(line))


def main() -> None:
    """A rank, by the variables of torchrun."""
    options = _parse()
    die_with_parent()
    signal.setitimer(signal.ITIMER_REAL, options.deadline_s)
    figures = _measure(options)
    if os.environ["RANK"] == "0":
        print(json.dumps(asdict(figures)))  # noqa: T201


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--collectives", choices=tuple(_DEVICES), default="nccl")
    parser.add_argument("--size-bytes", type=int, default=SIZE_BYTES, help="(%(default)s)")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="(%(default)s)")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> Figures:
    """Check both operations, then time them. Raises CollectivesFailed for a wrong result."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if _DEVICES[options.collectives] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.collectives, timeout=timedelta(seconds=options.deadline_s))
    tensor = torch.full((options.size_bytes // 4,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    _check(int((tensor != ranks * (ranks + 1) / 2).sum()), "all_reduce", rank)
    tensor.fill_(rank + 7)
    dist.broadcast(tensor, 0)
    _check(int((tensor != 7).sum()), "broadcast", rank)
    tensor.zero_()

    def seconds_of(operation: Callable[[], object]) -> float:
        started = time.monotonic()
        for _ in range(_REPEATS):
            operation()
        # Of device memory an operation has ended when a number of its result is on the host.
        float(tensor[0])
        return (time.monotonic() - started) / _REPEATS

    gigabytes = tensor.numel() * 4 / 1e9
    summed_s = seconds_of(lambda: dist.all_reduce(tensor))
    sent_s = seconds_of(lambda: dist.broadcast(tensor, 0))
    dist.destroy_process_group()
    return Figures(ranks, gigabytes * 2 * (ranks - 1) / ranks / summed_s, gigabytes / sent_s)


def _check(wrong: int, name: str, rank: int) -> None:
    """wrong: how many numbers are."""
    if wrong:
        raise CollectivesFailed(
            f"{name} left {wrong} numbers wrong on rank {rank}: update NCCL and the driver, or "
            "replace the adapter"
        )


if __name__ == "__main__":
    main()
