"""The trainer's side of a publish, written out in the test's own terms."""

import asyncio
import multiprocessing
import socket
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from generation.engine import Engine
from megatron_rl.protocol.types import Bucket, JoinGroup
from megatron_rl.weights.group import close_group, open_group

TIMEOUT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_message(group_name: str) -> JoinGroup:
    return JoinGroup("127.0.0.1", free_port(), 1, 2, group_name, "gloo", TIMEOUT_S)


def open_as_trainer(join: JoinGroup) -> dist.ProcessGroup:
    return open_group(
        join.address, join.port, 0, join.world_size, join.group_name, join.backend, join.timeout_s
    )


def buckets(model: LlamaForCausalLM, version: int) -> list[tuple[Bucket, torch.Tensor]]:
    """All tensors of a model in two buckets: (message, flattened bytes)."""
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    result = []
    for part in (named[:7], named[7:]):
        message = Bucket(
            [name for name, _ in part],
            ["float32"] * len(part),
            [list(tensor.shape) for _, tensor in part],
            version,
        )
        flat = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for _, tensor in part])
        result.append((message, flat))
    return result


def broadcast(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(flat, src=0, group=group, async_op=True).wait(timedelta(seconds=TIMEOUT_S))


def serve_trainer(pipe: Connection) -> None:
    """Take rank 0's part in what the pipe asks for: a JoinGroup, bytes to broadcast, or None."""
    torch.set_num_threads(1)
    group = None
    while (asked := pipe.recv()) != "end":
        if isinstance(asked, JoinGroup):
            group = open_as_trainer(asked)
        elif isinstance(asked, bytes):
            broadcast(torch.frombuffer(bytearray(asked), dtype=torch.uint8), group)
        else:
            close_group(group)
        pipe.send("done")


class TrainerProcess:
    """Trainer rank 0 in a process of its own: torch allows a group's name once in a process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_trainer, args=(theirs,), daemon=True)
        self._process.start()

    def ask(self, what: JoinGroup | bytes | None) -> None:
        self._pipe.send(what)
        assert self._pipe.poll(TIMEOUT_S), "the trainer process did not answer"
        assert self._pipe.recv() == "done"

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join(TIMEOUT_S)


class DirectPublisher:
    """Calls an engine's weight methods while a trainer process takes part in the collectives."""

    def __init__(self, engine: Engine, trainer: TrainerProcess, group_name: str) -> None:
        self._engine = engine
        self._trainer = trainer
        self._join = join_message(group_name)

    async def open(self) -> None:
        await asyncio.gather(
            self._engine.join_group(self._join), asyncio.to_thread(self._trainer.ask, self._join)
        )

    async def publish(self, model: LlamaForCausalLM, version: int) -> None:
        await self._engine.pause()
        for message, flat in buckets(model, version):
            await asyncio.gather(
                self._engine.receive_bucket(message),
                asyncio.to_thread(self._trainer.ask, flat.numpy().tobytes()),
            )
        await self._engine.resume(version)

    async def close(self) -> None:
        await self._engine.leave_group()
        await asyncio.to_thread(self._trainer.ask, None)
