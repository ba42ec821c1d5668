"""One weight sync of a rehearsed rank: a trainer rank sends, or a rank of an engine receives.

Each process runs the product's leader for the whole weight sync, with a separate store. The leader
and the sender have the product's threads (`weights/sync/reshard.py`). `Peers` says what the other
processes would say by messages and in the store. Nobody sends what they would send.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.generator import GeneratorConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.nccl_settings import CHOSEN, own_settings
from megatron_rl.protocol.types import Ack, AnyMessage, Hello, Receive
from megatron_rl.protocol.wire import Router
from megatron_rl.rehearsal.engine_parameters import parameters_of
from megatron_rl.rehearsal.events import SYNC
from megatron_rl.rehearsal.tracer import Tracer
from megatron_rl.rehearsal.transports import engine_name, install
from megatron_rl.trainer.model.build import DTYPES
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.train import make_syncer, open_method, settings_of
from megatron_rl.weights.exchange import packets
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.orders import Ready, Report, key
from megatron_rl.weights.exchange.plan import Layouts, kind_of
from megatron_rl.weights.layout.place import like_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.sync.control import Control, T
from megatron_rl.weights.sync.leader import Leader
from megatron_rl.weights.sync.link import GeneratorLink
from megatron_rl.weights.sync.syncer import WeightSyncer

LIMIT_S = 250.0
"""Of every wait of a weight sync; below that of a rank (`rehearse.RANK_LIMIT_S`)."""
JOIN_LIMIT_S = 2.0
"""After a transfer that failed, until the rehearsal says why."""


class Peers(Router):
    """All generators, and all ranks of their engines that this process does not rehearse.

    Stands in the place of rank 0's socket. They obey at once, and report that all arrived whole.
    """

    def __init__(
        self,
        generator: GeneratorConfig,
        own: tuple[str, int] = ("", -1),
        take: Callable[[Receive], object] = lambda order: None,
    ) -> None:
        """own: replica and rank that this process has. take: called with that replica's orders."""
        ranks, experts = generator.tensor_parallel, generator.expert_parallel
        hello = Hello(ranks, generator.engine, "", expert_parallel=experts, nccl=own_settings())
        self.members = {engine_name(number): hello for number in range(generator.replicas)}
        self._own, self._take = own, take
        self._said: deque[tuple[str, AnyMessage]] = deque(self.members.items())
        self._store: dist.TCPStore | None = None

    def send(self, peer: str, message: AnyMessage) -> bool:
        """The peer obeys and answers."""
        if isinstance(message, Receive):
            self._take_part(peer, message)
        self._said.append((peer, Ack(type(message).__name__)))
        return True

    def receive(self, timeout_s: float) -> tuple[str, AnyMessage] | None:
        """What a peer has said."""
        if self._said:
            return self._said.popleft()
        time.sleep(timeout_s)
        return None

    def _take_part(self, peer: str, order: Receive) -> None:
        if self._store is None:
            self._store = open_store(order.address, order.port, is_master=False, timeout_s=LIMIT_S)
        for rank in range(self.members[peer].world_size):
            if (peer, rank) != self._own:
                for kind, said in (("ready", Ready()), ("done", Report())):
                    where = key(kind, order.attempt, peer, rank)
                    self._store.set(where, msgspec.json.encode(said))
        if peer == self._own[0]:
            self._take(order)


class KnownControl(Control):
    """Shares a value that each process has computed, as each plays rank 0 for itself."""

    def share(self, value: Any, kind: type[T]) -> T:
        """As the trainer's: through broadcasts from rank 0."""
        self._frame = bytearray(msgspec.msgpack.encode(value))
        return super().share(value, kind)

    def told(self, tensor: Tensor) -> Tensor:
        """What rank 0 broadcasts to such a tensor: the size of the frame, or the frame."""
        if tensor.dtype is torch.int64:
            return torch.tensor([len(self._frame)])
        return torch.frombuffer(self._frame, dtype=torch.uint8)


def send_weights(cfg: Config, policy: Policy, tracer: Tracer) -> WeightSyncer:
    """A trainer rank's part in a weight sync; the syncer, which keeps its buffers.

    Raises RuntimeError for a transfer that fails.
    """
    cfg = _bounded(cfg, tracer)
    control = KnownControl(policy.backend.host_group(LIMIT_S))
    tracer.told = control.told
    link = GeneratorLink(Peers(cfg.generator))
    with tracer.in_phase(SYNC), tracer.threads():
        tracer.memory.purpose = SYNC
        method = open_method(cfg, policy, control=control, link=link)
        _prepare(method.store, [r for r in range(control.world_size) if r != control.rank])
        syncer = make_syncer(cfg, policy, method, control=control, link=link)
        syncer.await_generators()
        syncer.sync(version=0)
        for attempt in range(cfg.weights.groups):
            if method.store.check([failed := key("failed", attempt)]):
                raise RuntimeError(method.store.get(failed).decode())
    return syncer


def layouts_of(cfg: Config, shape: ModelShape) -> Layouts:
    """Trainer and engines of the configuration, as the trainer describes them."""
    [kind] = {kind_of(hello) for hello in Peers(cfg.generator).members.values()}
    size, trainers = DTYPES[cfg.model.dtype].itemsize, cfg.parallel.world_size
    like, bucket_bytes = like_of(cfg.parallel), cfg.weights.bucket_bytes
    has_lanes = cfg.weights.method == "reshard"
    return Layouts(shape, like, trainers, kind, size, bucket_bytes, few_senders=has_lanes)


def receive_weights(cfg: Config, shape: ModelShape, number: int, tracer: Tracer) -> int:
    """An engine rank's part in a weight sync; the count of its parameters.

    Raises RuntimeError when it fails.
    """
    cfg = _bounded(cfg, tracer)
    layouts, trainers = layouts_of(cfg, shape), cfg.parallel.world_size
    engine, rank = divmod(number - trainers, layouts.kind.world_size)
    settings = settings_of(cfg, dist.Backend.NCCL, "rehearsal")
    slices, quantises = layouts.kind.slices(shape, rank), bool(cfg.generator.quantization)
    parameters = parameters_of(slices, settings.dtype, quantises=quantises)
    held = EngineRank(lambda: parameters, rank, settings.dtype, may_pad_ffn=False)
    master = open_store(settings.host, 0, is_master=True, timeout_s=LIMIT_S)
    _prepare(master, range(trainers))
    # No word of a packet is known: they are taken to arrive whole.
    tracer.assumed = _is_whole
    with tracer.in_phase(SYNC), tracer.threads(), ThreadPoolExecutor(1) as pool:
        tracer.memory.purpose = SYNC
        peers = Peers(cfg.generator, (engine_name(engine), rank), partial(pool.submit, held.take))
        leader = Leader(GeneratorLink(peers), master, settings, trainers)
        leader.announce(0, layouts)
        if failed := leader.lead(peers.members, dict.fromkeys(peers.members, 0), 0).failed:
            raise RuntimeError("; ".join(failed.values()))
    return sum(parameter.numel() for parameter in parameters.values())


def _bounded(cfg: Config, tracer: Tracer) -> Config:
    """The configuration for peers that are all in this process. Prepares the process too."""
    install(cfg, tracer)
    _trace_digests_once()
    os.environ.update({**CHOSEN, **os.environ})
    limits = {"deadline_s": LIMIT_S, "grace_s": LIMIT_S, "join_timeout_s": JOIN_LIMIT_S}
    weights = cfg.weights.model_copy(update=limits)
    ports = cfg.ports.model_copy(update={"host": "127.0.0.1"})
    return cfg.model_copy(update={"weights": weights, "ports": ports})


def _trace_digests_once() -> None:
    """Take a digest whole for the first payload of its size; others would be the same operations.

    They would be most of the time of a rehearsal.
    """
    take, sizes = packets.word_sums, set[int]()

    def digest(payload: Tensor) -> Tensor:
        if payload.numel() in sizes:
            return payload.new_empty(packets.WORDS, dtype=torch.int64)
        sizes.add(payload.numel())
        return take(payload)

    packets.word_sums = digest


def _prepare(store: dist.Store, ranks: Sequence[int]) -> None:
    """Other trainer ranks wait for the first call."""
    for rank in ranks:
        store.set(key("prepared", 0, rank), "")


def _is_whole(func: object, args: tuple[object, ...]) -> Tensor | None:
    """Whether a parcel is damaged follows from words that are not there."""
    return torch.tensor(False) if func is torch.ops.aten.bitwise_not.default else None
