"""Generators with the real WeightClient and EngineRank, and faults by plan; to test syncing.

A generator is a process of its own, with one more for each rank of its engine. It notes in a file
what it serves, also before it is killed.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generation.async_sockets import AsyncDealer
from generation.engine import EngineError
from generation.weight_client import WeightClient, await_room
from megatron_rl.protocol.process import die_with_parent
from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange import group_transport, parcels
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.packets import Packet
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share
from tests.weights.made_up import SHAPE, allocate, fill, own_device

FILE_PATIENCE_S = 120.0
POLL_S = 0.02
DAWDLE_S = 1.5


@dataclass(frozen=True)
class Generator:
    """A generator. Its ranks hold SGLang's slices; 0 ranks are one with transformers' tensors."""

    name: str
    ranks: int = 1
    lives: tuple[dict[int, str], ...] = ({},)
    """For each life: which of its pauses brings which fault. A death begins the next life.

    "dawdle X S" and "stop reading S" last until the trainer has done step S. Without S the first
    lasts DAWDLE_S, the second until the play ends.
    """
    shape: ModelShape = SHAPE
    starts_after: int = -1
    """Step of the trainer that it waits for; -1: none."""
    start_s: float = -1.0
    """How long its engine starts, after it has asked for room; -1: it does not ask."""
    expert: int = 1
    """Ranks among which whole experts are divided."""
    device: str = "cpu"
    prefix: str = ""
    """What its parameters' names begin with, unlike ours."""


def host(port: int, generator: Generator, folder: Path) -> list[dict[str, Any]]:
    """Live the generator's lives until the trainer has ended; its notes."""
    if generator.starts_after >= 0:
        await_file(folder / f"step-{generator.starts_after}")
    for faults in generator.lives:
        pid = os.fork()
        if not pid:
            live(port, generator, faults, folder)
        while not (folder / "end").exists():
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(POLL_S)
        else:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
    await_file(folder / "end")
    notes = folder / f"{generator.name}.jsonl"
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def await_file(path: Path) -> None:
    ends_at = time.monotonic() + FILE_PATIENCE_S
    while not path.exists():
        assert time.monotonic() < ends_at, f"no {path.name}"
        time.sleep(POLL_S)


def live(port: int, generator: Generator, faults: dict[int, str], folder: Path) -> None:
    """One life of a generator, in a process group of its own; never returns."""
    try:
        os.setsid()
        die_with_parent()
        pipes = [start_rank(generator, rank, folder) for rank in range(max(1, generator.ranks))]
        engine = PipedEngine(generator, pipes, faults, folder / f"{generator.name}.jsonl")
        asyncio.run(serve(f"127.0.0.1:{port}", generator, engine))
    finally:
        os._exit(1)


async def serve(address: str, generator: Generator, engine: "PipedEngine") -> None:
    with AsyncDealer(address, generator.name) as dealer:
        if generator.start_s >= 0:
            await await_room(dealer, FILE_PATIENCE_S)
            engine.note("starts")
            engine.suffer("start")
            await asyncio.sleep(generator.start_s)
            engine.note("is ready")
        client = WeightClient(dealer, engine, lambda: engine.note("version"))  # type: ignore[arg-type]
        await client.run()


class PipedEngine:
    """An engine whose ranks are processes at the other ends of pipes; notes what it serves."""

    engine_version = "1"
    ffn_multiple = 1

    def __init__(
        self, generator: Generator, pipes: list[Connection], faults: dict[int, str], notes: Path
    ) -> None:
        self.name = "scripted" if generator.ranks else "hf"
        self.world_size = len(pipes)
        self.expert_parallel = generator.expert
        self.version = -1
        self._pipes, self._faults, self._notes = pipes, faults, notes
        self._pauses = -1
        self._has_memory = True

    def note(self, event: str) -> None:
        # What serves nobody need not be right.
        is_right = (
            self.version < 0 or not self._has_memory or all(self._ask("is_right", self.version))
        )
        line = {"event": event, "version": self.version, "is_right": is_right}
        for what in ("step", "freed"):
            line[what] = len(list(self._notes.parent.glob(f"{what}-*")))
        with self._notes.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _ask(self, command: str, argument: Any = None) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((command, argument, self._faults.get(self._pauses, "")))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise EngineError(answer)
        return answers

    async def _work(self, command: str, argument: Any) -> None:
        assert self._has_memory or command in ("lose", "leave"), f"{command} without memory"
        await asyncio.get_running_loop().run_in_executor(None, self._ask, command, argument)

    def suffer(self, occasion: str) -> None:
        fault = self._faults.get(self._pauses, "")
        if fault.endswith(("release", "reclaim")) and fault.endswith(occasion):
            # Also what fails before another pause fails once.
            del self._faults[self._pauses]
        match fault.split():
            case ["fail", when] if when == occasion:
                raise EngineError(f"scripted failure of {occasion}")
            case ["dawdle", when] if when == occasion:
                time.sleep(DAWDLE_S)
            case ["dawdle", when, step] if when == occasion:
                await_file(self._notes.parent / f"step-{step}")
            case ["die", when] if when == occasion:
                os.killpg(0, signal.SIGKILL)

    async def pause(self) -> None:
        self._pauses += 1
        self.suffer("pause")

    async def release(self) -> None:
        self.suffer("release")
        self.note("releases")
        self._has_memory = False
        await self._work("lose", None)

    async def reclaim(self) -> None:
        self.suffer("reclaim")
        if not self._has_memory:
            self.note("reclaims")
        self._has_memory = True

    async def receive(self, order: Receive) -> None:
        self.suffer("receive")
        await self._work("take", order)

    async def resume(self, version: int) -> None:
        self.suffer("resume")
        self.version = version
        if self._faults.get(self._pauses) == "die idle":
            asyncio.get_running_loop().call_later(0.2, os.killpg, 0, signal.SIGKILL)

    async def leave_group(self) -> None:
        await self._work("leave", None)


def start_rank(generator: Generator, rank: int, folder: Path) -> Connection:
    """The pipe to an engine rank in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        return ours
    try:
        die_with_parent()
        ScriptedRank(generator, rank, folder).serve(theirs)
    finally:
        os._exit(1)


class ScriptedRank:
    """Parameters and what happens to them."""

    def __init__(self, generator: Generator, rank: int, folder: Path) -> None:
        """folder: of the play."""
        self._shape = generator.shape
        self._slices = (
            engine_slices(
                self._shape, Share(rank, generator.ranks), expert_parallel=generator.expert
            )
            if generator.ranks
            else hf_slices(self._shape)
        )
        device = own_device(generator.device, f"{generator.name}-{rank}")
        self._parameters = allocate(self._slices, device)
        dtype = torch.float32
        named = {generator.prefix + name: value for name, value in self._parameters.items()}
        self._exchange = EngineRank(lambda: named, rank, dtype, may_pad_ffn=False)
        self._rank, self._folder = rank, folder

    def serve(self, pipe: Connection) -> None:
        while True:
            command, argument, fault = pipe.recv()
            try:
                answer = getattr(self, command)(argument, fault)
            except RuntimeError as error:
                answer = f"{type(error).__name__}: {error}"
            pipe.send(answer)

    def take(self, order: Receive, fault: str) -> bool:
        real_unpack, real_join = parcels.unpack, group_transport.join_group
        if self._rank == 0:
            bring(fault, self._folder)
        self._exchange.take(order)
        parcels.unpack, group_transport.join_group = real_unpack, real_join
        return True

    def is_right(self, version: int, fault: str) -> bool:
        expected = allocate(self._slices)
        fill(expected, self._slices, self._shape, version)
        return all(torch.equal(self._parameters[name].cpu(), expected[name]) for name in expected)

    def lose(self, argument: None, fault: str) -> bool:
        for tensor in self._parameters.values():
            tensor.fill_(float("nan"))
        return True

    def leave(self, argument: None, fault: str) -> bool:
        self._exchange.leave()
        return True


def bring(fault: str, folder: Path) -> None:
    """Let a fault happen in this engine rank's next transfer."""
    real = parcels.unpack

    def unpack(packets: Iterable[Packet], *args: Any) -> Tensor:
        match fault.split():
            case ["die", "transfer"]:
                os.killpg(0, signal.SIGKILL)
            case ["stop", "reading", *step]:
                await_file(folder / (f"step-{step[0]}" if step else "end"))
            case ["damage"]:
                packets = list(packets)
                packets[0].payload[5] ^= 4
        parcels.unpack = real
        return real(packets, *args)

    def join(*args: Any, **options: Any) -> Any:
        os.killpg(0, signal.SIGKILL)

    if fault == "die join":
        group_transport.join_group = join
    elif fault.startswith(("die transfer", "stop reading", "damage")):
        parcels.unpack = unpack
