"""What another engine of one rank takes from an engine that passes a version on."""

import threading
import time
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from megatron_rl.protocol.types import Hello, PassOn, Receive
from megatron_rl.weights.exchange.engine_rank import Receiver, Report
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.exchange.sender import Call, call_key, gives_key, prepared_key
from megatron_rl.weights.layout.engine_layout import hf_slices
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.sync.reshard import receiver_slices
from tests.generation.precision import DTYPE
from tests.ports import free_port
from tests.weights.made_up import allocate

TIMEOUT_S = 30.0
BUCKET_ELEMENTS = 25_000


@dataclass(frozen=True)
class PassedOn:
    """One transfer from an engine to a rank that takes the model under Hugging Face's names."""

    order: PassOn
    receive: Receive
    plan: Plan
    shape: ModelShape
    expected: dict[str, Tensor]


def plan_passing(
    shape: ModelShape, hello: Hello, version: int, expected: dict[str, Tensor]
) -> PassedOn:
    senders = {rank: receiver_slices(shape, hello, rank) for rank in range(hello.world_size)}
    taker, port, name = hello.world_size, free_port(), f"passed-on-{version}"
    taken, itemsize = {taker: hf_slices(shape)}, DTYPE.itemsize
    plan = make_plan(senders, taken, itemsize=itemsize, bucket_bytes=BUCKET_ELEMENTS * itemsize)
    order = PassOn("127.0.0.1", port, name, version, TIMEOUT_S)
    receive = Receive("127.0.0.1", port, name, "gloo", taker, taker + 1, 1, version, TIMEOUT_S)
    return PassedOn(order, receive, plan, shape, expected)


def take_passed_on(asked: PassedOn) -> None:
    """Rank 0's part and the taker's: every parameter is the expected one, bit for bit."""
    receive, taker = asked.receive, asked.receive.rank_offset
    store = open_store(receive.address, receive.port, is_master=True, timeout_s=TIMEOUT_S)
    for rank in range(taker):
        store.set(gives_key(rank), msgspec.json.encode(asked.plan.of_sender(rank)))
    store.set(f"plan/{taker}", msgspec.json.encode(asked.plan.of_receiver(taker)))
    room = allocate(hf_slices(asked.shape))
    parameters = {name: tensor.to(DTYPE) for name, tensor in room.items()}
    found: list[Report] = []

    def take() -> None:
        receiver = Receiver(lambda: parameters, 0, DTYPE, may_pad_ffn=False)
        found.append(receiver.take(receive))
        receiver.leave()

    taking = threading.Thread(target=take)
    taking.start()
    for rank in range(taker):
        fault = store.get(prepared_key(0, rank)).decode()
        assert not fault, fault
    assert not store.get(f"ready/1/{taker}")
    store.set("go/1", "1")
    ends_at = time.monotonic() + TIMEOUT_S
    store.set(call_key(0), msgspec.json.encode(Call(receive, ends_at - time.monotonic())))
    taking.join(TIMEOUT_S)
    store.set(call_key(1), msgspec.json.encode(Call()))
    assert (found[0].error, found[0].damaged) == ("", 0)
    for name, expected in asked.expected.items():
        assert torch.equal(parameters[name].view_as(expected), expected), name
