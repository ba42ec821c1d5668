"""A group over NCCL is made apart from the trainer's own, has deadlines, and its failure stays its
own. NCCL itself is scripted; the group is made by torch's code."""

import inspect
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.weights.exchange.group import close_group, join_group
from megatron_rl.weights.exchange.group_transport import GroupTransport, Lane
from megatron_rl.weights.exchange.orders import Call
from megatron_rl.weights.exchange.parcels import outgoing
from megatron_rl.weights.exchange.plan import Move, Parcel, Plan
from tests.distributed import run_ranks
from tests.weights.exchange.scripted_nccl import (
    UNDEFINED,
    ScriptedNccl,
    bound_default_group,
    install,
)

DEVICE = torch.device("cuda", 0)
MOVES = (Move(4, 4, "a", 0, 0, "b", 0, 0),)


def make(name: str = "exchange", timeout_s: float = 2.5) -> ScriptedNccl:
    join_group(dist.HashStore(), 0, range(3), name=name, backend="nccl", timeout_s=timeout_s)
    return ScriptedNccl.made[-1]


def made_beside_a_bound_group(chosen: str | None) -> tuple:
    install()
    default = bound_default_group()
    if chosen is not None:
        os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = chosen
    group = make()
    return (
        group.options.split_from is None,
        group.options.config.blocking,
        group.options._timeout.total_seconds(),
        group.blocking_wait,
        os.environ.get("TORCH_NCCL_BLOCKING_WAIT"),
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"],
        default.bound_device_id,
    )


def test_a_group_is_no_part_of_a_default_group_that_is_bound_to_a_device() -> None:
    [found] = run_ranks(made_beside_a_bound_group, 1, None)
    assert found == (True, 0, 2.5, "1", None, "3", DEVICE)


def test_who_chose_how_communicators_wait_is_obeyed() -> None:
    [found] = run_ranks(made_beside_a_bound_group, 1, "0")
    assert found[1] == UNDEFINED and found[0]


def split_by_torch() -> bool:
    install()
    bound_default_group()
    store = dist.PrefixStore("x", dist.HashStore())
    try:
        distributed_c10d._new_process_group_helper(
            3, 0, [], dist.Backend("nccl"), store, group_name="x", timeout=dist.default_pg_timeout
        )
    except AssertionError as error:
        # torch 2.14 looks at what it would split: here a group over gloo.
        return "split_from" in str(error)
    return ScriptedNccl.made[-1].options.split_from is not None


def test_torch_itself_would_split_the_default_group() -> None:
    # Else the care that `made_apart` takes, and the test above, would be about nothing.
    assert run_ranks(split_by_torch, 1) == [True]


def test_torch_asks_nothing_but_the_binding_before_it_splits() -> None:
    source = inspect.getsource(distributed_c10d._new_process_group_helper)
    assert "if is_initialized() and _get_default_group().bound_device_id:" in source
    assert source.count("_get_split_source(") == 1


def failed_making() -> tuple:
    install()
    default = bound_default_group()
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    ScriptedNccl.refuses_to_be_made = True
    with pytest.raises(dist.DistBackendError):
        make()
    return default.bound_device_id, os.environ["TORCH_NCCL_BLOCKING_WAIT"]


def test_what_was_set_for_the_making_is_restored_when_it_fails() -> None:
    assert run_ranks(failed_making, 1) == [(DEVICE, "0")]


def closed() -> tuple:
    install()
    bound_default_group()
    group = make()
    close_group(group)
    # Its name is free again: torch has forgotten it.
    return group.is_aborted, group.is_shut_down, make() is not group


def test_a_group_is_aborted_and_not_destroyed() -> None:
    assert run_ranks(closed, 1) == [(True, False, True)]


def stalled() -> tuple:
    install()
    bound_default_group()
    plan = Plan((tuple(Parcel(0, rank, MOVES) for rank in (1, 2)),), 4, 1)
    # Another transfer forms another group.
    for name in ("exchange", "next"):
        transport = GroupTransport(dist.HashStore(), 0, torch.device("cpu"), "nccl")
        call = Call(0, 1, 0, name, ("a",), 2.0, 20.0)
        with pytest.raises(RuntimeError, match="timed out after [12]\\."):
            transport.begin(call, plan)
    group = ScriptedNccl.made[0]
    return group.is_aborted, len(group.senders), len(ScriptedNccl.made)


def test_a_peer_that_stalls_while_a_group_forms_costs_the_deadline_and_the_group() -> None:
    # The ranks meet by a send: for a collective, which it lacks, NCCL would keep a GB of buffers.
    assert run_ranks(stalled, 1) == [(True, 1, 2)]


def failed_batch() -> tuple:
    install()
    bound_default_group()
    group = make()
    transport = GroupTransport(dist.HashStore(), 0, torch.device("cpu"), "nccl")
    # As `begin` leaves it.
    transport._call = Call(0, group="lanes", replicas=("a",))
    transport._groups = {"lanes": (("a",), {1: Lane(group, (0,), 1)})}
    [parcels] = outgoing([[Parcel(0, 1, MOVES)]], {"a": torch.ones(4, 4)}, torch.float32)
    transport.lend(parcels)
    wait = transport.send(parcels)
    ScriptedNccl.refuses_sends = True
    with pytest.raises(RuntimeError, match="NCCL timeout"):
        transport.send(parcels)
    return callable(wait), len(group.senders), threading.get_ident() in group.senders


def test_a_batch_starts_in_a_thread_that_its_failure_may_spoil() -> None:
    # torch counts open groups of NCCL in each thread, and a failed batch leaves the count at one.
    assert run_ranks(failed_batch, 1) == [(True, 2, False)]


def test_torch_counts_open_groups_in_each_thread() -> None:
    header = Path(torch.__file__).parent.joinpath(
        "include", "torch", "csrc", "distributed", "c10d", "ProcessGroupNCCL.hpp"
    )
    assert "static thread_local uint64_t ncclActiveGroupCounter_;" in header.read_text()


def refused_abort() -> bool:
    install()
    bound_default_group()
    group = make()

    def abort() -> None:
        raise dist.DistBackendError("abort timed out")

    group.abort = abort
    close_group(group)
    return True


def test_an_abort_that_fails_ends_nobody() -> None:
    assert run_ranks(refused_abort, 1) == [True]
