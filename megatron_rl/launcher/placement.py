"""Assigns roles to nodes and GPUs. Pure except `listed_gpus` and `found_gpus`.

Used by the launcher. GPUs are counted through all nodes: first the trainer's ranks, then the
engines, then the scorer. An engine spans several nodes only if it has more ranks than a node has
GPUs; then it takes whole nodes.
"""

import os
from dataclasses import dataclass, field

from megatron_rl.backend.cpu.sglang import torch_is_for_cpu
from megatron_rl.backend.environment import GPUS_VARIABLE, named_gpus
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.plan.card import query_gpus


@dataclass(frozen=True)
class NodeRoles:
    """Roles of one node. The first node also runs the queue."""

    trainer_ranks: int = 0
    trainer_nodes: int = 0
    """Number of nodes with trainer ranks: the first ones."""
    engines: dict[int, range] = field(default_factory=dict)
    """Generator -> its GPUs on this node."""
    engine_nodes: dict[int, "EngineNode"] = field(default_factory=dict)
    """Generator -> this node's part of an engine that spans nodes."""
    scorer: range = range(0)
    """GPUs of the scorer, counted on its node."""
    scorer_node: int = 0
    """Node that runs the scorer, where the run has one."""
    has_verifier: bool = True
    """Every configured node runs one, without spare nodes."""
    gpus_per_node: int = field(default=0, compare=False)
    """Number by which the roles of all nodes were placed; 0: without GPUs, or of one that joins."""

    def are_vital(self, config: Config, node: int) -> bool:
        """Whether the run cannot continue without these roles of a node other than the first."""
        return bool(self.trainer_ranks) or self._serves_alone(config, node)

    def _serves_alone(self, config: Config, node: int) -> bool:
        """Whether it runs the scorer, or a part of an engine that lies on other nodes too."""
        has_scorer = config.has_scorer and node == self.scorer_node
        return bool(self.engine_nodes or has_scorer)

    def can_return(self, config: Config, node: int) -> bool:
        """Whether the trainer alone needs this node: it waits for the node when it is lost."""
        return bool(self.trainer_ranks) and not self._serves_alone(config, node)


@dataclass(frozen=True)
class EngineNode:
    """A node's part of an engine that spans several nodes."""

    rank: int
    """Index among the engine's nodes; 0 leads the engine."""
    count: int


def place(config: Config, *, nodes: int, gpus_per_node: int) -> list[NodeRoles]:
    """Roles by node. Raises InputError when they do not fit."""
    ranks, width = _trainer_ranks(config), config.generator.tensor_parallel
    _check_widths(config, ranks, gpus_per_node)
    trainer_nodes = -(-ranks // gpus_per_node)
    engines: list[dict[int, range]] = [{} for _ in range(nodes)]
    engine_nodes: list[dict[int, EngineNode]] = [{} for _ in range(nodes)]
    needed = nodes_needed(config, gpus_per_node=gpus_per_node)
    if needed > nodes:
        wanted = [f"{ranks} trainer ranks", f"{config.generator.replicas} engines of {width} GPUs"]
        fewer = ["parallel.data", "generator.replicas"]
        if config.has_scorer:
            wanted.append(f"a scorer of {config.scorer.tensor_parallel}")
            fewer.append("scorer.tensor_parallel")
        if config.nodes.spare:
            wanted.append(f"{config.nodes.spare} spare nodes")
            fewer.append("expert.nodes.spare")
        raise InputError(
            f"{' and '.join(wanted)} need {needed} nodes of {gpus_per_node} GPUs, and there are "
            f"{nodes}: lower {' or '.join(fewer)}, or start the run on that many nodes with "
            "`megatron-rl prepare` and `megatron-rl node` (docs/slurm.md)"
        )
    of_engines, of_scorer = _gpus_of(config, gpus_per_node)
    for index, found in enumerate(of_engines):
        node, start = divmod(found.start, gpus_per_node)
        count = -(-width // gpus_per_node)
        for rank in range(count):
            engines[node + rank][index] = range(start, start + width // count)
            if count > 1:
                engine_nodes[node + rank][index] = EngineNode(rank, count)
    scorer_node, start = divmod(of_scorer.start, gpus_per_node) if of_scorer else (0, 0)
    scorer = range(start, start + len(of_scorer))
    per_node = min(ranks, gpus_per_node)
    return [
        NodeRoles(
            per_node if node < trainer_nodes else 0,
            trainer_nodes,
            engines[node],
            engine_nodes[node],
            scorer,
            scorer_node,
            has_verifier=node < nodes - config.nodes.spare,
            gpus_per_node=gpus_per_node,
        )
        for node in range(nodes)
    ]


def active_nodes(config: Config, nodes: int) -> int:
    """Number of the nodes that are not spare ones, of all nodes of the run: the first ones."""
    return nodes - config.nodes.spare


def returning_nodes(config: Config, *, active: int, gpus_per_node: int) -> list[int]:
    """Nodes other than the first for which the trainer waits when they are lost."""
    roles = place(config, nodes=active + config.nodes.spare, gpus_per_node=gpus_per_node)
    return [node for node, one in enumerate(roles) if node and one.can_return(config, node)]


def only_node(config: Config, gpus: list[str]) -> NodeRoles:
    """All roles on the only node of a run, with or without GPUs. Raises InputError."""
    if gpus:
        return place(config, nodes=1, gpus_per_node=len(gpus))[0]
    engines = {index: range(0) for index in range(config.generator.replicas)}
    return NodeRoles(_trainer_ranks(config), 1, engines)


def nodes_needed(config: Config, *, gpus_per_node: int) -> int:
    """Fewest nodes on which trainer ranks, engines and the scorer fit, with spare nodes."""
    end = _gpus_of(config, gpus_per_node)[1].stop
    return max(1, -(-end // gpus_per_node)) + config.nodes.spare


def _trainer_ranks(config: Config) -> int:
    """Trainer ranks; 0 without training, which leaves all GPUs to the engines."""
    return config.parallel.world_size if config.train.steps or config.sft.steps else 0


def _gpus_of(config: Config, gpus_per_node: int) -> tuple[list[range], range]:
    """GPUs of each engine, and of the scorer behind them, counted through all nodes.

    The scorer's lie on one node; without a scorer the range is empty.
    """
    ranks, width = _trainer_ranks(config), config.generator.tensor_parallel
    engines, first = list[range](), 0 if config.generator.colocate else ranks
    for _ in range(config.generator.replicas):
        engines.append(_fitted(first, width, gpus_per_node))
        first = engines[-1].stop
    of_scorer = config.scorer.tensor_parallel if config.has_scorer else 0
    return engines, _fitted(max(ranks, first), of_scorer, gpus_per_node)


def _fitted(first: int, width: int, gpus_per_node: int) -> range:
    """The next GPUs from `first` on that begin a node if they do not fit behind others."""
    if first % gpus_per_node + width > gpus_per_node:
        first += -first % gpus_per_node
    return range(first, first + width)


def _check_widths(config: Config, ranks: int, gpus_per_node: int) -> None:
    """Raise InputError unless trainer and engines fill whole nodes."""
    width = config.generator.tensor_parallel
    if ranks > gpus_per_node and ranks % gpus_per_node:
        raise InputError(
            f"{ranks} trainer ranks do not fill whole nodes of {gpus_per_node} GPUs: choose "
            "parallel sizes whose product is a multiple of them, or smaller than a node"
        )
    tensor = config.parallel.tensor
    if config.parallel.overlap_tensor and ranks > gpus_per_node and gpus_per_node % tensor:
        raise InputError(
            f"expert.parallel.overlap_tensor=true with parallel.tensor={tensor} on nodes of "
            f"{gpus_per_node} GPUs: tensor ranks of different nodes cannot open each other's "
            "buffers; choose a parallel.tensor that divides them, or set it to false"
        )
    if width > gpus_per_node and width % gpus_per_node:
        raise InputError(
            f"generator.tensor_parallel = {width} is more than the {gpus_per_node} GPUs of a node, "
            "and no multiple of them: an engine across nodes takes whole ones; nearest possible: "
            f"{width - width % gpus_per_node}"
        )
    if width > gpus_per_node and config.generator.engine != "sglang":
        raise InputError(
            f"generator.tensor_parallel = {width} is more than the {gpus_per_node} GPUs of a node: "
            f"only SGLang's engines lie across nodes, not {config.generator.engine!r}"
        )
    if width > gpus_per_node and config.weights.method == "ipc":
        raise InputError(
            f"generator.tensor_parallel = {width} is more than the {gpus_per_node} GPUs of a node, "
            "and weights.method='ipc' shares memory of one node: use 'reshard' or 'folder'"
        )
    if config.has_scorer and config.scorer.tensor_parallel > gpus_per_node:
        raise InputError(
            f"scorer.tensor_parallel = {config.scorer.tensor_parallel} is more than the "
            f"{gpus_per_node} GPUs of a node, and a scorer lies on one node: lower it, or set "
            "algorithm.reference.source = 'trainer'"
        )


def gpu_environment(gpus: range, names: list[str]) -> dict[str, str]:
    """Variable that shows a process only these GPUs; names: of all GPUs of the node."""
    return {GPUS_VARIABLE: ",".join(names[gpu] for gpu in gpus)} if names else {}


def listed_gpus() -> list[str]:
    """Names of the GPUs that this node's processes use; [] without GPUs, or torch for them."""
    return [] if torch_is_for_cpu() else found_gpus()


def found_gpus() -> list[str]:
    """Names of the GPUs that this node shows, whatever torch was built for.

    Raises InputError for a GPU that is named twice, for which CUDA offers none, and if nvidia-smi
    does not answer.
    """
    if GPUS_VARIABLE in os.environ:
        given = os.environ[GPUS_VARIABLE]
        named = named_gpus(given)
        if len(set(named)) < len(named):
            raise InputError(f"{GPUS_VARIABLE}={given} names a GPU twice: name each once")
        return named
    return query_gpus("index").split()


@dataclass(frozen=True)
class Machines:
    """The nodes of a run."""

    nodes: int | None = 1
    """None: the number that the configuration needs."""
    gpus_per_node: int | None = None
    """None: the number that this node lists."""

    def place(self, config: Config) -> list[NodeRoles]:
        """Roles by node; [] if this node lists no GPUs. Raises InputError."""
        count = self.gpus_per_node or len(listed_gpus())
        if not count:
            return []
        nodes = self.nodes or nodes_needed(config, gpus_per_node=count)
        return place(config, nodes=nodes, gpus_per_node=count)

    def warning(self) -> str:
        """Why `place` cannot check whether the roles fit the nodes; "": it can."""
        if self.gpus_per_node or listed_gpus():
            return ""
        return (
            "warning: this node lists no GPUs, so nothing checks whether the roles fit the nodes: "
            "give --gpus-per-node. On nodes without GPUs give --gpus-per-node 1 here, and to "
            "`megatron-rl node`, which needs it"
        )


ONE_NODE = Machines()
