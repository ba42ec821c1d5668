"""What trainer, weight sync, verifiers and faults cost: the model of a cluster. Pure.

Used by the simulation; engines are in `engine.py`. Filled from sizes of GPUs and the model
(`hardware.py`) or from the records of a run (`calibration.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.plan.flops import bubble_share, causal_pairs
from megatron_rl.rollout_queue.batches import MinibatchPlan
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.weights.layout.copies import turns_before, turns_busy


@dataclass(frozen=True)
class TrainerModel:
    """Seconds of a step, from the lengths of the sequences of each microbatch.

    A microbatch takes `microbatch_s + token_s * tokens + pair_s * pairs`, where pairs are those of
    a query and a key of its sequences, and the positions that fill it up; a minibatch as long as
    its slowest data-parallel rank, and the optimizer.
    """

    token_s: float
    pair_s: float = 0.0
    microbatch_s: float = 0.0
    optimizer_s: float = 0.0
    """Of each minibatch: reduction of gradients, update."""
    step_s: float = 0.0
    """Of each step beside its minibatches."""
    window: int | None = None
    """Tokens that one sees; None: all before it."""
    stages: int = 1
    """Of the pipeline."""
    virtual_stages: int = 1
    positions: int = 0
    """That every microbatch has (`expert.train.pad_microbatches`); 0: those of its sequences."""
    filling_s: float = 0.0
    """Of a position that fills a microbatch up."""
    ranks_meet: bool = False
    """Data-parallel ranks wait for each other in every microbatch: experts lie across them."""

    def compute_s(self, plans: Sequence[MinibatchPlan]) -> float:
        """Of all forward and backward passes of a step, and its optimizer steps but the last."""
        passes = [self._minibatch_s(plan) for plan in plans]
        return self.step_s + sum(passes) + self.optimizer_s * (len(plans) - 1)

    def _minibatch_s(self, plan: MinibatchPlan) -> float:
        ranks = [[self._pass_s(plan.lengths, m) for m in rank] for rank in plan.ranks]
        if self.ranks_meet:
            slowest = sum(max(passes) for passes in zip(*ranks, strict=True))
        else:
            slowest = max(sum(passes) for passes in ranks)
        if self.virtual_stages > 1:
            # Placeholders are as long as other microbatches where all have one size.
            slowest += -len(ranks[0]) % self.stages * self.positions * self.filling_s
        # The share is over the ideal time: (p - 1) / (v m + p - 1) of the whole.
        bubble = bubble_share(self.stages, self.virtual_stages, len(ranks[0]))
        return slowest / (1.0 - bubble)

    def _pass_s(self, lengths: Sequence[int], microbatch: Sequence[int]) -> float:
        tokens = sum(lengths[i] for i in microbatch)
        pairs = 0
        if self.pair_s:
            pairs = sum(causal_pairs(lengths[i], self.window) for i in microbatch)
        filling_s = self.filling_s * max(0, self.positions - tokens)
        return self.microbatch_s + self.token_s * tokens + self.pair_s * pairs + filling_s


@dataclass(frozen=True)
class WeightSyncModel:
    """How weights come to the engines."""

    replica_s: float
    """From the pause of an engine until it goes on, with nobody beside it."""
    lanes: int = 1
    """Engines that are served at once; 1: one after the other."""
    sender_share: float = 0.0
    """Share of what all senders can send that one engine's transfer takes when it is alone."""
    fixed_s: float = 0.0
    """Of a weight sync beside the transfers; engines go on meanwhile."""
    is_overlapped: bool = False
    """Sent during the next step's passes, and joined before its optimizer step."""
    is_relayed: bool = False
    """Engines pass weights on; each lane is the root of a tree (`weights/layout/copies.py`)."""

    def times(self, replicas: int) -> tuple[list[tuple[float, float]], float]:
        """([(pause, resume) of each engine], seconds until the trainer is done)."""
        if self.is_relayed:
            return self._relayed(replicas)
        found: list[tuple[float, float]] = []
        at = self.fixed_s
        for first in range(0, replicas, self.lanes):
            count = min(self.lanes, replicas - first)
            seconds = self.replica_s * max(1.0, count * self.sender_share)
            found += [(at, at + seconds)] * count
            at += seconds
        return found, at

    def _relayed(self, replicas: int) -> tuple[list[tuple[float, float]], float]:
        found = []
        for engine in range(replicas):
            # Dealt to the lanes in turn, as `Bindings` does.
            place, lane = engine // self.lanes + 1, engine % self.lanes
            places = -(-(replicas - lane) // self.lanes)
            begins, ends = turns_before(place) - 1, turns_busy(place, places)
            found.append(
                (self.fixed_s + begins * self.replica_s, self.fixed_s + ends * self.replica_s)
            )
        return found, max(resume for _, resume in found)


@dataclass(frozen=True)
class Turns:
    """Engines on the trainer's GPUs that give their memory back while it computes."""

    release_s: float
    """From when the trainer has its batch until it has the memory."""
    reclaim_s: float
    """Of a weight sync, until the engines have theirs again."""


@dataclass(frozen=True)
class VerifierModel:
    """Servers that grade, first come first served."""

    servers: int
    service_s: tuple[float, ...] = (0.0,)
    """Seconds of grading, one of them for each completion: measured ones, or a single figure."""


@dataclass(frozen=True)
class Faults:
    """Deaths of engines at random moments."""

    deaths_per_engine_hour: float = 0.0
    restart_s: float = 300.0
    """From a death until the new engine has started; it waits for weights after that."""
    dead_from_start: int = 0
    """Engines that never serve."""


@dataclass(frozen=True)
class ClusterModel:
    """All of it."""

    engine: EngineModel
    trainer: TrainerModel
    sync: WeightSyncModel
    verifier: VerifierModel
    faults: Faults = field(default_factory=Faults)
    turns: Turns | None = None
    """None: engines have GPUs of their own."""
