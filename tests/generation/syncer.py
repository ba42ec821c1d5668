"""The trainer's side of a weight sync, written out in the test's own terms."""

import asyncio
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import msgspec
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from generation.engine import Engine
from megatron_rl.protocol.types import Hello, Receive
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.group_transport import open_transport
from megatron_rl.weights.exchange.orders import Call, Ready, Report, key
from megatron_rl.weights.exchange.parcels import outgoing, send
from megatron_rl.weights.exchange.plan import Layouts, Plan, kind_of
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import as_matrix
from megatron_rl.weights.layout.trainer_layout import trainer_slices
from tests.generation.precision import BACKEND, DEVICE, DTYPE
from tests.ports import free_port
from tests.weights.made_up import allocate

TIMEOUT_S = 30.0
START_S = 120.0
"""Seconds for a new process to import its libraries, on a busy machine."""
BUCKET_ELEMENTS = 25_000


@dataclass
class Exchange:
    """What to tell both ends: one trainer rank that holds all of a model, and an engine."""

    receive: Receive
    layouts: Layouts


def plan_exchange(shape: ModelShape, hello: Hello, name: str) -> Exchange:
    itemsize = DTYPE.itemsize
    layouts = Layouts(shape, Place(), 1, kind_of(hello), itemsize, BUCKET_ELEMENTS * itemsize, True)
    assert len(layouts.plan().rounds) > 3
    receive = Receive("127.0.0.1", free_port(), name, "engine", 0, BACKEND, 0, 0, TIMEOUT_S)
    return Exchange(receive, layouts)


def of_attempt(exchange: Exchange, attempt: int, version: int) -> Exchange:
    order = msgspec.structs.replace(exchange.receive, attempt=attempt, version=version)
    return replace(exchange, receive=order)


class SliceSender:
    """Trainer rank 0 of one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        order = exchange.receive
        self._store = open_store(order.address, order.port, is_master=True, timeout_s=TIMEOUT_S)
        self._store.set(key("layouts", 0), msgspec.json.encode(exchange.layouts))
        self._plan, self._ranks = exchange.layouts.plan(), exchange.layouts.kind.world_size
        self._transport = open_transport(
            self._store, 0, DEVICE, backend=order.backend, dtype=DTYPE, folder=order.folder
        )

    def send(self, exchange: Exchange, parameters: dict[str, Tensor]) -> list[Report]:
        """What the receivers say."""
        order = exchange.receive
        for rank in range(self._ranks):
            said = self._store.get(key("ready", order.attempt, order.replica, rank))
            ready = msgspec.json.decode(said, type=Ready)
            assert not ready.error, ready.error
        of_all = (order.replica,)
        go = Call(order.attempt, order.version, 0, order.syncer, of_all, TIMEOUT_S, TIMEOUT_S)
        self._store.set(key("go", order.attempt), msgspec.json.encode(go))
        self._transport.begin(go, self._plan)
        held = of_trainer(exchange.layouts.shape, parameters)
        rounds = self._plan.of_sender(0)
        ends = outgoing(rounds, held, DTYPE, stages_all=self._transport.stages_all)
        send(ends, self._transport, dtype=DTYPE, version=order.version)
        keys = [key("done", order.attempt, order.replica, rank) for rank in range(self._ranks)]
        return [msgspec.json.decode(self._store.get(each), type=Report) for each in keys]

    def close(self) -> None:
        self._transport.close()


def of_trainer(shape: ModelShape, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a trainer's only rank, from the tensors of a model folder."""
    slices = trainer_slices(shape, Place())
    held = {name: value.to(DTYPE) for name, value in allocate(slices).items()}
    for part in slices:
        source = as_matrix(named[part.hf])[part.row :, part.column :][: part.rows, : part.columns]
        target = held[part.local][part.local_row :, part.local_column :]
        target[: part.rows, : part.columns] = source
    return {name: value.to(DEVICE) for name, value in held.items()}


def check_reports(reports: list[Report], plan: Plan) -> None:
    for rank, report in enumerate(reports, start=1):
        assert (report.error, report.damaged) == ("", 0)
        assert report.payload_bytes == plan.received_bytes()[rank]


def parameters_of(model: LlamaForCausalLM) -> dict[str, Tensor]:
    return {name: tensor.detach().to(DTYPE) for name, tensor in model.named_parameters()}


def serve_trainer(pipe: Connection) -> None:
    """Take rank 0's part in what the pipe asks for.

    That is an Exchange to prepare, (Exchange, parameters) to send, or None to leave the groups of
    the one that was prepared last.
    """
    torch.set_num_threads(1)
    closings: list[Callable[[], None]] = []
    pipe.send("done")
    while (asked := pipe.recv()) != "end":
        if isinstance(asked, Exchange):
            sender = SliceSender(asked)
            closings.append(sender.close)
        elif isinstance(asked, tuple):
            check_reports(sender.send(*asked), asked[0].layouts.plan())
        else:
            closings.pop()()
        pipe.send("done")


class TrainerProcess:
    """Trainer rank 0 in a process of its own: torch allows a group's name once in a process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_trainer, args=(theirs,), daemon=True)
        self._process.start()
        # Only the process has the other end now, so its death ends a wait.
        theirs.close()
        self._has_started = False

    def ask(self, what: object) -> None:
        if not self._has_started:
            self._await(START_S)
            self._has_started = True
        self._pipe.send(what)
        self._await(TIMEOUT_S)

    def _await(self, limit_s: float) -> None:
        assert self._pipe.poll(limit_s), f"the trainer process did not answer in {limit_s:.0f} s"
        assert self._pipe.recv() == "done"

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join(TIMEOUT_S)
        self._pipe.close()


class SliceSyncer:
    """Calls an engine's weight methods while a trainer process sends slices."""

    def __init__(
        self, engine: Engine, trainer: TrainerProcess, shape: ModelShape, group_name: str
    ) -> None:
        self._engine, self._trainer = engine, trainer
        hello = Hello(engine.world_size, engine.name, "", ffn_multiple=engine.ffn_multiple)
        self._exchange = plan_exchange(shape, hello, group_name)
        self._attempts = 0

    async def open(self) -> None:
        await asyncio.to_thread(self._trainer.ask, self._exchange)

    async def sync(self, model: LlamaForCausalLM, version: int) -> None:
        await self.sync_tensors(parameters_of(model), version)

    async def sync_tensors(self, named: dict[str, Tensor], version: int) -> None:
        """named: the tensors of a model folder."""
        await self._engine.pause()
        self._attempts += 1
        exchange = of_attempt(self._exchange, self._attempts, version)
        await asyncio.gather(
            self._engine.receive(exchange.receive),
            asyncio.to_thread(self._trainer.ask, (exchange, named)),
        )
        await self._engine.resume(version)

    async def close(self) -> None:
        await self._engine.leave_group()
        await asyncio.to_thread(self._trainer.ask, None)
