"""torch's collectives as events. They are seen where torch dispatches them, whoever calls them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work

from megatron_rl.rehearsal.values import tensors_in

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}
"""Operation of torch's c10d -> kind of an event."""
_OUTPUT_FIRST = {
    "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_",
}  # fmt: skip
"""Their first argument receives, and their second is given."""


def name_of(operation: Any) -> str:
    """Of an operation of torch.ops.c10d, such as "allreduce_"."""
    return operation._schema.name.partition("::")[2]


def group_of(args: tuple[Any, ...]) -> ProcessGroup:
    """The process group among the arguments."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return ProcessGroup.unbox(each)
    raise ValueError("a collective without a process group")


def detail_of(args: tuple[Any, ...], kind: str) -> str:
    """The root of a broadcast, on which all ranks must agree.

    torch does not tell Python which reduction an argument is.
    """
    return f"root {args[2]}" if kind == "broadcast" else ""


def given_by(operation: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that the rank gives; of a receive, those that it gets."""
    return tensors_in(args[1 if operation in _OUTPUT_FIRST else 0])


class AwaitedWork(Work):
    """Work of an operation that sends nothing. It calls `wait_begins` when a rank waits for it."""

    def __init__(self, wait_begins: Callable[[], object]) -> None:
        super().__init__()
        self._wait_begins = wait_begins

    def wait(self, *limit: Any) -> bool:
        """As torch's."""
        self._wait_begins()
        return True


def answer(operation: Any, args: tuple[Any, ...], work: Work | None = None) -> Any:
    """What the operation returns where nothing is sent. work: default: torch's own."""
    boxed = Work.boxed(work or FakeWork())
    return (args[0], boxed) if len(operation._schema.returns) == 2 else boxed


def group_name(group: dist.ProcessGroup) -> str:
    """Description and ranks: equal on all of its ranks, and no other group's."""
    ranks = dist.get_process_group_ranks(group)
    return f"{group.group_desc or 'group'} [{','.join(_runs(ranks))}]"


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    """Ranks in words, more than 4 at equal distances together."""
    start = 0
    while start < len(ranks):
        end = start + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == ranks[start + 1] - ranks[start]:
            end += 1
        run = ranks[start:end]
        if len(run) > 4:
            step = run[1] - run[0]
            yield f"{run[0]}..{run[-1]}" + (f" step {step}" if step > 1 else "")
        else:
            yield from map(str, run)
        start = end
