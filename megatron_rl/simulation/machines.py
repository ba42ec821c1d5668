"""The cluster model: costs of trainer, weight sync, verifiers and faults. Pure.

Engines are in `engine.py`. `hardware.py` fills the model from sizes of GPUs and model,
`calibration.py` from the records of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rl.plan.flops import bubble_share, causal_pairs
from megatron_rl.rollout_queue.batches import MinibatchPlan
from megatron_rl.simulation.engine import EngineModel


@dataclass(frozen=True)
class TrainerModel:
    """Seconds of a step, from the lengths of the sequences of each microbatch.

    A microbatch takes `microbatch_s + token_s * tokens + pair_s * pairs` (pairs of a query and a
    key) and its padding. A minibatch takes as long as its slowest data-parallel rank, and the
    optimizer.
    """

    token_s: float
    pair_s: float = 0.0
    microbatch_s: float = 0.0
    optimizer_s: float = 0.0
    """Per minibatch: reduction of gradients, update."""
    step_s: float = 0.0
    """Per step, outside its minibatches."""
    window: int | None = None
    """Attention window in tokens; None: unlimited."""
    full_pair_s: float = 0.0
    """As `pair_s`, in layers for which the window does not hold."""
    stages: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    positions: int = 0
    """Positions of every microbatch (`expert.train.pad_microbatches`); 0: its own tokens."""
    filling_s: float = 0.0
    """Per padding position."""
    ranks_meet: bool = False
    """Data-parallel ranks wait for each other in every microbatch (expert parallelism)."""

    def compute_s(self, plans: Sequence[MinibatchPlan]) -> float:
        """Seconds of all passes of a step and its optimizer steps except the last."""
        passes = [self._minibatch_s(plan) for plan in plans]
        return self.step_s + sum(passes) + self.optimizer_s * (len(plans) - 1)

    def _minibatch_s(self, plan: MinibatchPlan) -> float:
        ranks = [[self._pass_s(plan.lengths, m) for m in rank] for rank in plan.ranks]
        if self.ranks_meet:
            slowest = sum(max(passes) for passes in zip(*ranks, strict=True))
        else:
            slowest = max(sum(passes) for passes in ranks)
        if self.virtual_stages > 1:
            # Padded placeholders take as long as other microbatches.
            slowest += -len(ranks[0]) % self.stages * self.positions * self.filling_s
        # The share is over the ideal time: (p - 1) / (v m + p - 1) of the whole.
        bubble = bubble_share(self.stages, self.virtual_stages, len(ranks[0]))
        return slowest / (1.0 - bubble)

    def _pass_s(self, lengths: Sequence[int], microbatch: Sequence[int]) -> float:
        tokens = sum(lengths[i] for i in microbatch)
        attention_s = sum(
            pair_s * causal_pairs(lengths[i], window)
            for pair_s, window in ((self.pair_s, self.window), (self.full_pair_s, None))
            if pair_s
            for i in microbatch
        )
        filling_s = self.filling_s * max(0, self.positions - tokens)
        return self.microbatch_s + self.token_s * tokens + attention_s + filling_s


@dataclass(frozen=True)
class WeightSyncModel:
    pause_s: float
    """Pause of all engines, which are served together."""
    late_s: float = 0.0
    """Pause of an engine that is served alone; 0: as long."""
    fixed_s: float = 0.0
    """Time outside the transfer; engines generate meanwhile."""
    is_overlapped: bool = False
    """Sent during the next step's passes, ended before its optimizer step."""

    @property
    def total_s(self) -> float:
        """Seconds until the trainer is done."""
        return self.fixed_s + self.pause_s


@dataclass(frozen=True)
class Turns:
    """Colocated engines that release their memory while the trainer computes."""

    release_s: float
    """From the batch's arrival until the trainer has the memory."""
    reclaim_s: float
    """In a weight sync, until the engines have their memory."""


@dataclass(frozen=True)
class VerifierModel:
    """Grading servers, first come first served."""

    servers: int
    service_s: tuple[float, ...] = (0.0,)
    """Grading times to draw from: measured times, or one assumed time."""


@dataclass(frozen=True)
class Faults:
    """Random deaths of engines."""

    deaths_per_engine_hour: float = 0.0
    restart_s: float = 300.0
    """From a death until the new engine waits for weights."""
    dead_from_start: int = 0
    """Engines that never serve."""


@dataclass(frozen=True)
class ClusterModel:
    engine: EngineModel
    trainer: TrainerModel
    sync: WeightSyncModel
    verifier: VerifierModel
    faults: Faults = field(default_factory=Faults)
    turns: Turns | None = None
    """None: engines and trainer share no GPU."""
