"""Engines hand on what they receive: every byte is sent and received once by each rank."""

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.distributed as dist

from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange import group_transport
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.group_transport import Lane, open_transport
from megatron_rl.weights.exchange.orders import Call, Ready, Report, key
from megatron_rl.weights.exchange.packets import Packet
from megatron_rl.weights.exchange.parcels import outgoing
from megatron_rl.weights.exchange.plan import EngineKind, Layouts, Plan
from megatron_rl.weights.exchange.transport import IPC
from megatron_rl.weights.layout.place import Place, place_of
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import trainer_slices
from megatron_rl.weights.sync.reshard import Sender
from tests.distributed import run_ranks
from tests.ports import free_port
from tests.weights.made_up import SHAPE, allocate, buffer_bytes, fill

DTYPE, LIMIT_S, VERSIONS = torch.float32, 30.0, (0, 1)
WIDE = replace(SHAPE, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=4096)
"""With matrices that travel by themselves, and many small tensors that travel together."""


def counted_bytes() -> Counter[str]:
    """Bytes that this process sends and receives in lanes from now on, by operation."""
    found: Counter[str] = Counter()
    real = group_transport._op

    def op(operation: Callable[..., object], packet: Packet, lane: Lane, peer: int) -> dist.P2POp:
        found[operation.__name__] += packet.nbytes
        return real(operation, packet, lane, peer)

    group_transport._op = op
    return found


def be_rank(port: int, layouts: Layouts, replicas: int, backend: str) -> dict[str, int] | bool:
    """Trainer ranks come first, then the ranks of each engine."""
    rank, trainers = int(os.environ["RANK"]), layouts.trainer_ranks
    moved = counted_bytes()
    names = tuple(f"engine-{n}" for n in range(replicas))
    if rank < trainers:
        return train(rank, port, layouts, names, backend, moved)
    replica, place = divmod(rank - trainers, layouts.kind.world_size)
    slices = layouts.kind.slices(layouts.shape, place)
    held = allocate(slices)
    engine = EngineRank(lambda: held, place, DTYPE, may_pad_ffn=False)
    is_right = True
    for version in VERSIONS:
        call = 2 * version
        engine.take(
            Receive("127.0.0.1", port, "chain", names[replica], 0, backend, call, version, LIMIT_S)
        )
        expected = allocate(slices)
        fill(expected, slices, layouts.shape, version)
        is_right &= all(torch.equal(held[name], expected[name]) for name in expected)
    engine.leave()
    return dict(moved) | {"is_right": is_right}


def train(
    rank: int, port: int, layouts: Layouts, names: tuple[str, ...], backend: str,
    moved: Counter[str],
) -> dict[str, int]:  # fmt: skip
    """Rank 0 also does what the leader does."""
    if rank == 0:
        master = open_store("127.0.0.1", port, is_master=True, timeout_s=LIMIT_S)
        master.set(key("layouts", 0), msgspec.json.encode(layouts))
    store = open_store("127.0.0.1", port, is_master=False, timeout_s=LIMIT_S)
    transport = open_transport(
        store, rank, torch.device("cpu"), backend=backend, dtype=DTYPE, folder=""
    )
    sender = Sender(store, transport, rank=rank, dtype=DTYPE, patience_s=LIMIT_S)
    slices = trainer_slices(layouts.shape, place_of(rank, layouts.trainer_ranks, layouts.like))
    parameters, plan = allocate(slices), layouts.plan()
    engine_ranks = range(layouts.kind.world_size)
    for version in VERSIONS:
        fill(parameters, slices, layouts.shape, version)
        ends = outgoing(plan.of_sender(rank), parameters, DTYPE, stages_all=transport.stages_all)
        if rank == 0:
            call_for(master, 2 * version, version, names, engine_ranks)
        sender.serve({0: ends}, {0: plan})
        if rank == 0:
            check_reports(master, 2 * version, names, plan)
    transport.close()
    return dict(moved)


def call_for(
    store: dist.TCPStore, call: int, version: int, names: tuple[str, ...], engine_ranks: range
) -> None:
    """When all are ready: a transfer to all engines, and the end of the weight sync."""
    for pair in itertools.product(names, engine_ranks):
        ready = msgspec.json.decode(store.get(key("ready", call, *pair)), type=Ready)
        assert ready.error == ""
    order = Call(call, version, 0, "group", names, LIMIT_S, LIMIT_S)
    store.set(key("go", call), msgspec.json.encode(order))
    store.set(key("go", call + 1), msgspec.json.encode(Call(call + 1, is_end=True)))


def check_reports(store: dist.TCPStore, call: int, names: tuple[str, ...], plan: Plan) -> None:
    assert not store.check([key("failed", call)])
    for name, (rank, receiver) in itertools.product(names, enumerate(plan.receivers)):
        report = msgspec.json.decode(store.get(key("done", call, name, rank)), type=Report)
        assert (report.error, report.damaged) == ("", 0)
        assert report.payload_bytes == plan.received_bytes()[receiver]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("replicas", "stages"), [(1, 2), (3, 1), (3, 2)])
def test_every_byte_is_sent_once_by_its_root_whatever_the_number_of_engines(
    replicas: int, stages: int
) -> None:
    """Engines of two ranks hand on what two trainer ranks send.

    Each of two data-parallel ranks is the root of a lane; two pipeline stages are roots of both.
    """
    kind = EngineKind("scripted", 2)
    like = Place(Share(0, 1), Share(0, stages), Share())
    layouts = Layouts(WIDE, like, 2, kind, 4, 300_000, few_senders=True)
    plan = layouts.plan()
    assert [plan.roots(2 + rank) for rank in range(2)] == (
        [[0, 1]] * 2 if stages > 1 else [[0], [1]]
    )
    assert len(plan.rounds) >= 4
    found = run_ranks(be_rank, 2 + 2 * replicas, free_port(), layouts, replicas, "gloo")
    parcels = [parcel for each in plan.rounds for parcel in each]
    sizes = [(parcel, len(VERSIONS) * buffer_bytes(parcel, DTYPE)) for parcel in parcels]
    # An element by which the ranks of a lane meet.
    met = 4
    for rank in range(2):
        sent = sum(size for parcel, size in sizes if parcel.sender == rank)
        assert found[rank] == {"isend": sent + stages * met}
    for number, moved in enumerate(found[2:]):
        replica, rank = divmod(number, 2)
        size = sum(size for parcel, size in sizes if parcel.receiver == 2 + rank)
        handed_on = {} if replica == replicas - 1 else {"isend": size + met}
        received = size + met * (1 if replica else stages)
        assert moved == {"is_right": True, "irecv": received} | handed_on


@pytest.mark.timeout(300)
def test_engines_read_shared_memory_all_at_once() -> None:
    layouts = Layouts(WIDE, Place(), 1, EngineKind("scripted", 1), 4, 300_000, False)
    _, *engines = run_ranks(be_rank, 3, free_port(), layouts, 2, IPC)
    assert engines == [{"is_right": True}] * 2
