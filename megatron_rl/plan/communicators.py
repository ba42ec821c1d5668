"""Device memory and start of the NCCL communicators of a weight sync. Pure; used by plans.

A lane (`weights/exchange/group_transport.py`) is a communicator, and shares no buffer with another.
Roots send to the first engine, and each engine to the next. There is no collective, for which NCCL
would connect its trees: 10 MiB for each end, neighbour and channel, a GB in all. A trainer rank
keeps its lanes, and as many more while a generator that joins has separate ones. An engine rank is
in one lane at a time.

The figures follow NCCL's source (2.22 to 2.30: `init.cc`, `transport/net.cc`, `transport/p2p.cc`,
`transport/generic.cc`) with its defaults, and published logs. No lane has run on GPUs: bytes are
derived bounds, seconds are estimates.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.gpus import HOST_GPUS, MIB
from megatron_rl.config.tree import Config

BUFFER_BYTES = 10 * MIB
"""Of one end of a connection in one channel: 0.5 MiB for protocol LL, 4.7 for LL128 and 4 for
Simple, in pages of 2 MiB. NCCL issue 1685 logs 10,485,760."""
FIXED_BYTES = 64 * MIB
"""An allowance for a communicator's structures, queues of work and credits of multicast."""
INIT_S, INIT_S_PER_RANK = 1.4, 0.085
"""Seconds until a communicator is there, and more for each of its ranks. Source: NCCL issue 534
(2.10, V100, InfiniBand), 2.0 s with 8 ranks and 4.1 s with 32. Since 2.22 later communicators of a
process are faster (issue 1412: 0.6 s with 16 ranks, without the loading of kernels)."""


@dataclass(frozen=True)
class Links:
    """What NCCL chooses by the links of a communicator."""

    peer_channels: int
    """For sends to a peer on the same node, or from it."""
    pool_bytes: int
    """Of the buffer that all sends to other nodes share, and of that of all receives."""


BETWEEN_NODES = Links(peer_channels=2, pool_bytes=32 * MIB)
"""NCCL issue 1189: 2 channels for a peer. The pool has 16 steps of 128 KiB for each of 16 channels
(`sharedNetBuffersInit`; issue 1453: 16 on three nodes of 8 H100)."""
ON_ONE_NODE = Links(peer_channels=32, pool_bytes=0)
"""NCCL issues 1646 (8 B200) and 1685 (8 H100)."""


@dataclass(frozen=True)
class Communicators:
    """Memory and start of the communicators of a run's weight syncs."""

    trainer_bytes: int
    engine_bytes: int
    """Upper bounds, on the trainer rank and on the engine rank that need most."""
    starts_s: tuple[float, ...]
    """Estimated start in the first weight sync, of each part of the generators."""
    join_s: float
    """Estimated start for a generator that joins. The next version starts all lanes again."""


def communicator_bytes(peers: int, links: Links) -> int:
    """Upper bound of one communicator on a rank. peers: to which it sends or from which it gets.

    For NCCL that connects ranks when they first need it, which it does with NCCL_CUMEM_ENABLE=1.
    """
    local = min(peers, HOST_GPUS - 1) * links.peer_channels * BUFFER_BYTES
    return FIXED_BYTES + 2 * links.pool_bytes + local


def start_seconds(lanes: Sequence[Sequence[int]], engines: int) -> float:
    """Until the lanes of a row of engines are there. lanes: the trainer ranks of each.

    A trainer rank forms its lanes one after the other; lanes without a common rank form meanwhile.
    """
    free_s: dict[int, float] = defaultdict(float)
    for roots in lanes:
        ready_s = INIT_S + INIT_S_PER_RANK * (len(roots) + engines)
        ready_s += max(free_s[rank] for rank in roots)
        free_s.update(dict.fromkeys(roots, ready_s))
    return max(free_s.values())


def trainer_communicator_bytes(config: Config, lanes: int) -> int:
    """Upper bound for a trainer rank. lanes: number of its lanes. 0 without NCCL."""
    if config.weights.method != "reshard":
        return 0
    return lanes * (len(_rows(config)) + 1) * communicator_bytes(1, _links(config))


def engine_communicator_bytes(config: Config, roots: int) -> int:
    """Upper bound for a rank of the first engine. roots: number of its senders. 0 without NCCL."""
    if config.weights.method != "reshard":
        return 0
    return communicator_bytes(roots + 1, _links(config))


def find_communicators(config: Config, lanes: Sequence[Sequence[int]]) -> Communicators | None:
    """The communicators of a configuration; None without NCCL. lanes: the trainer ranks of each."""
    if config.weights.method != "reshard":
        return None
    of_rank = Counter(rank for roots in lanes for rank in roots)
    return Communicators(
        trainer_communicator_bytes(config, max(of_rank.values())),
        engine_communicator_bytes(config, max(map(len, lanes))),
        tuple(start_seconds(lanes, engines) for engines in _rows(config)),
        start_seconds(lanes, 1),
    )


def _rows(config: Config) -> list[int]:
    """Engines of each part that is served by itself (expert.weights.groups), in its own lanes."""
    engines, parts = config.generator.replicas, config.weights.groups
    return [len(range(start, engines, parts)) for start in range(min(parts, engines))]


def _links(config: Config) -> Links:
    """By the number of nodes of the run: one, or several."""
    engine_ranks = config.generator.replicas * config.generator.tensor_parallel
    is_one_node = config.parallel.world_size + engine_ranks <= HOST_GPUS
    return ON_ONE_NODE if is_one_node else BETWEEN_NODES
