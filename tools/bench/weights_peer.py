"""Processes of tools.bench.weights.

- Trainer rank, `weights_peer FOLDER` under torchrun: syncs by every method in turn. Rank 0 writes
  its `Sample`s to FOLDER/result.json.
- Generator, `weights_peer FOLDER --index N`: receives weights, generates nothing. It is the
  product's weight client with an SGLang server, or (`Job.is_bare`) with only a receiver, so that
  many generators fit on one node.
- Rank of an SGLang server, `load`: replaces the product's loader, and records the memory growth of
  each transfer.

No process imports both Megatron and SGLang.
"""

import asyncio
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import psutil
import torch
import torch.distributed as dist

from megatron_rl.config.tree import Config
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.types import Hello, Receive
from megatron_rl.weights.exchange import engine_rank, parcels
from megatron_rl.weights.sync import reshard
from megatron_rl.weights.sync.link import Outcome
from tools.bench.children import read_job
from tools.bench.measuring import rotations, start_peak, status_bytes
from tools.bench.weights_exchanges import FLOOR, GLOO, RAW, RECEIVE, SEND, limited_links

RESHARD, OVERLAP = "reshard", "overlap"
AWAY_S = 0.02


class Job(msgspec.Struct, frozen=True):
    """Work of the processes of a layout."""

    repeats: int
    methods: tuple[str, ...]
    link_bytes_per_s: int = 0
    """Link of each receiver; 0: no limit."""
    is_bare: bool = False


class Sample(msgspec.Struct, frozen=True):
    """One weight sync to all generators by one method."""

    method: str
    seconds: float
    transfers_s: list[float]
    """Slowest rank of each generator; [] without a transfer."""
    pauses_s: list[float]
    wire_bytes: int
    """Payload."""
    loopback_bytes: int
    """Received by the machine's loopback device during the sync."""
    minimum_bytes: int
    """Parameters of all engine ranks."""
    trainer_peak_bytes: int
    """Buffers, maximum of the trainer ranks."""
    engine_peak_bytes: int
    trainer_growth_bytes: int
    """Growth of resident memory, maximum of the trainer ranks."""
    stall_s: float = 0.0
    """Wait of trainer rank 0."""


class Exchange:
    """A reshard that sends by raw, floor or gloo, or overlaps with the caller's work (overlap)."""

    def __init__(self, method: Any, name: str) -> None:
        self._method, self._name = method, name
        self.forget, self.close = method.forget, method.close
        self.stall_s = 0.0
        """Wait of the caller in the last overlapped weight sync."""

    def sync(self, members: dict[str, Hello], version: int) -> Outcome:
        """Sync by the named exchange."""
        if self._name == OVERLAP:
            return self._sync_overlapped(members, version)
        is_floor = self._name == FLOOR
        find_digests = parcels.digest_in_place if is_floor else lambda packets: None
        with (
            patch.object(reshard, "send", SEND[self._name]),
            patch.object(parcels, "digest_in_place", find_digests),
        ):
            return self._method.sync(members, version)

    def _sync_overlapped(self, members: dict[str, Hello], version: int) -> Outcome:
        """Begin, sleep until rank 0 has finished, end."""
        started = time.monotonic()
        self._method.begin(members, version)
        self.stall_s = time.monotonic() - started
        while not self._method._control.share(self._method.is_over(), bool):
            time.sleep(AWAY_S)
        started = time.monotonic()
        outcome = self._method.end()
        self.stall_s += time.monotonic() - started
        return outcome


def sync_by_all(cfg: Config, job: Job) -> None:
    """Set up this trainer rank, sync by every method, write the samples."""
    from megatron_rl.protocol.wire import Router
    from megatron_rl.trainer.model.policy import open_policy
    from megatron_rl.weights.sync.control import Control
    from megatron_rl.weights.sync.link import GeneratorLink

    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(cfg))
        link = None
        if int(os.environ["RANK"]) == 0:
            router = stack.enter_context(Router(cfg.ports.host, cfg.ports.weights))
            link = GeneratorLink(router)
            link.await_peers(cfg.generator.replicas, cfg.weights.join_timeout_s)
        control = Control(policy.backend.host_group(3 * cfg.weights.deadline_s))
        peers = link.peers if link is not None else {}
        members = control.share(dict(sorted(peers.items())), dict[str, Hello])
        methods = {
            name: open_named(name, cfg, policy, control=control, link=link) for name in job.methods
        }
        minimum = minimum_bytes(policy, members)
        samples: list[Sample] = []
        with limited_links(job.link_bytes_per_s):
            orders = rotations(list(methods), job.repeats + 1)
            for version, name in enumerate(itertools.chain(*orders), 1):
                control.all(True)
                samples.append(measure(name, methods[name], members, version, minimum))
        for method in methods.values():
            method.close()
        if control.rank == 0:
            # The first repeat does not count.
            measured = msgspec.json.encode(samples[len(methods) :])
            (cfg.run.dir / "result.json").write_bytes(measured)


def open_named(name: str, cfg: Config, policy: Any, **given: Any) -> Any:
    """The product's method, or an `Exchange` around its reshard."""
    from megatron_rl.trainer.train import open_method

    known = RESHARD if name in (RAW, FLOOR, GLOO, OVERLAP) else name
    weights = cfg.weights.model_copy(update={"method": known})
    method = open_method(cfg.model_copy(update={"weights": weights}), policy, **given)
    # The engine's loader takes the exchange from the name (`received_as`).
    named = f"{name}-{method._settings.name}"
    method._settings = dataclasses.replace(method._settings, name=named)
    if method._leader is not None:
        method._leader._settings = method._settings
    return method if name == known else Exchange(method, name)


def minimum_bytes(policy: Any, members: dict[str, Hello]) -> int:
    """Parameter bytes of all engine ranks."""
    from megatron_rl.weights.exchange.plan import kind_of

    slices = [
        part
        for hello in members.values()
        for rank in range(hello.world_size)
        for part in kind_of(hello).slices(policy.shape, rank)
    ]
    itemsize = next(policy.chunks[0].parameters()).dtype.itemsize
    return itemsize * sum(part.size for part in slices)


def measure(
    name: str, method: Any, members: dict[str, Hello], version: int, minimum: int
) -> Sample:
    start_peak()
    resident, loopback, started = status_bytes("VmRSS"), loopback_bytes(), time.monotonic()
    outcome = method.sync(members, version)
    seconds, loopback = time.monotonic() - started, loopback_bytes() - loopback
    if outcome.failed or outcome.damaged:
        raise RuntimeError(f"{name}: {outcome.damaged} damaged parcels, {outcome.failed}")
    most = torch.tensor([getattr(method, "peak_bytes", 0), status_bytes("VmHWM") - resident])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Sample(
        method=name,
        seconds=seconds,
        transfers_s=outcome.transfers_s,
        pauses_s=outcome.pauses_s,
        wire_bytes=outcome.wire_bytes,
        loopback_bytes=loopback,
        minimum_bytes=minimum,
        trainer_peak_bytes=int(most[0]),
        engine_peak_bytes=outcome.peak_bytes,
        trainer_growth_bytes=int(most[1]),
        stall_s=method.stall_s if name == OVERLAP else seconds,
    )


def loopback_bytes() -> int:
    """Bytes that the loopback device has received."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


# --- generators -------------------------------------------------------------------------------


class BareEngine:
    """Parameters of an engine of one rank, without generation."""

    name, engine_version, world_size = "bare", "1", 1
    ffn_multiple, expert_parallel = 1, 1

    def __init__(self, config: Config) -> None:
        self.version = -1
        self._parameters = allocate(config)
        self._by_method: dict[str, engine_rank.EngineRank] = {}

    async def pause(self) -> None:
        """Nothing runs."""

    async def receive(self, order: Receive) -> None:
        """Receive the parcels, or plain bytes."""
        await asyncio.to_thread(self._take, order)

    def _take(self, order: Receive) -> None:
        """Each method has a receiver, which keeps its process group between syncs."""
        with received_as(order) as method:
            if method not in self._by_method:
                dtype = next(iter(self._parameters.values())).dtype
                self._by_method[method] = engine_rank.EngineRank(
                    lambda: self._parameters, 0, dtype, may_pad_ffn=False
                )
            self._by_method[method].take(order)

    async def resume(self, version: int) -> None:
        self.version = version

    async def leave_group(self) -> None:
        for each in self._by_method.values():
            each.leave()


def allocate(config: Config) -> dict[str, torch.Tensor]:
    """Zeros for all slices of an engine of one rank."""
    from megatron_rl.weights.layout.engine_layout import engine_slices
    from megatron_rl.weights.layout.shape import read_shape
    from megatron_rl.weights.layout.slices import Share

    sizes: dict[str, list[int]] = {}
    for part in engine_slices(read_shape(config.model.path), Share()):
        size = sizes.setdefault(part.local, [0, 0])
        size[0] = max(size[0], part.local_row + part.rows)
        size[1] = max(size[1], part.local_column + part.columns)
    dtype = getattr(torch, config.model.dtype)
    return {
        name: torch.zeros(rows, columns, dtype=dtype) for name, (rows, columns) in sizes.items()
    }


@contextmanager
def received_as(order: Receive) -> Iterator[str]:
    """Receive by the exchange in the syncer's name; yields its name."""
    method = order.syncer.partition("-")[0]
    with patch.object(engine_rank, "receive", RECEIVE.get(method, parcels.receive)):
        yield method


async def take_weights(config: Config, index: int, *, is_bare: bool) -> None:
    """Serve the trainer's orders. Raises EngineError when the server dies."""
    from generation.async_sockets import AsyncDealer
    from generation.engine import EngineError, engine_setup
    from generation.sglang_engine import SGLangEngine
    from generation.tasks import end_with_first
    from generation.weight_client import WeightClient

    class MeasuredEngine(SGLangEngine):
        """SGLang with `load` as its ranks' loader."""

        loader = "tools.bench.weights_peer.load"

    async def serve(engine: Any, *others: Any) -> None:
        endpoint = f"{config.ports.host}:{config.ports.weights}"
        with AsyncDealer(endpoint, f"generator-{index}") as dealer:
            client = WeightClient(dealer, engine, lambda: None)
            await end_with_first(client.run(), *others)

    async def watch(engine: SGLangEngine) -> None:
        raise EngineError(await engine.failed())

    if is_bare:
        torch.set_num_threads(1)
        await serve(BareEngine(config))
        return
    engine = MeasuredEngine(engine_setup(config, index, ()))
    try:
        await engine.start()
        await serve(engine, watch(engine))
    finally:
        await engine.close()


# --- ranks of SGLang servers --------------------------------------------------------------------


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Execute the engine's order; a transfer appends {"name", "bytes"} to a file in the log folder.

    bytes: maximum growth of this process in the transfer.
    """
    from generation.sglang_orders import ORDERS_VARIABLE, read_order

    order = read_order().order
    if not isinstance(order, Receive):
        return
    start_peak()
    before = status_bytes("VmRSS")
    with received_as(order) as method:
        _rank(model, method).take(order)
    row = {"name": order.syncer, "bytes": status_bytes("VmHWM") - before}
    path = Path(os.environ[ORDERS_VARIABLE]).with_suffix(f".growth-{os.getpid()}.jsonl")
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@functools.cache
def _rank(model: torch.nn.Module, method: str) -> Any:
    """The product's rank, one per method, which keeps its process group between syncs."""
    from generation import sglang_loader

    return sglang_loader._rank.__wrapped__(model)


def main() -> int:
    """Entry of trainer ranks, and with --index of generators."""
    config, job = read_job(Job)
    if "--index" not in sys.argv:
        role = f"trainer-{os.environ.get('RANK', '0')}"
        set_up_logging(role, config.run.dir / "logs")
        return run_main(role, partial(sync_by_all, config, job))
    from generation.tasks import end_with_first, interrupted

    index = int(sys.argv[-1])
    set_up_logging(f"generator-{index}", config.run.dir / "logs")

    async def work() -> None:
        await end_with_first(interrupted(), take_weights(config, index, is_bare=job.is_bare))

    return run_main(f"generator-{index}", lambda: asyncio.run(work()))


if __name__ == "__main__":
    sys.exit(main())
