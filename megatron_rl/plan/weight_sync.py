"""What a weight sync moves, and how long it takes. Pure; used by plans and simulations."""

from dataclasses import dataclass

from megatron_rl.config.generator import WeightsConfig
from megatron_rl.config.tree import Config
from megatron_rl.plan.generator import engine_rank_bytes
from megatron_rl.plan.trainer_memory import ITEM_BYTES
from megatron_rl.weights.layout.shape import ModelShape

NCCL_BYTES_PER_S, FOLDER_BYTES_PER_S = 25e9, 2e9
"""That one rank is taken to send or receive in a weight sync: over NCCL, and by way of files
(`weights.method = "folder"`). Estimates: neither has been timed between GPUs."""


def sync_rate(weights: WeightsConfig, given: float | None = None) -> float:
    """Bytes/s of one rank in a weight sync; given: what somebody knows of it."""
    if given is not None:
        return given
    return FOLDER_BYTES_PER_S if weights.method == "folder" else NCCL_BYTES_PER_S


PAPER_WEIGHT_SYNC_S = 5.0
"""In less weights reach the generators, even of large models. Source: Magistral (2506.10910)."""


@dataclass(frozen=True)
class WeightSyncCost:
    """What one weight sync to all generators moves, over NCCL or by way of files."""

    total_bytes: int
    """Received by all engines."""
    rank_bytes: int
    """Most that a rank of an engine receives."""
    lanes: int
    """Process groups: one for each rank of an engine."""
    rounds: int
    """Of the fullest lane."""
    seconds: float
    """Of the transfer to all generators; digests and pauses are not counted."""
    one_s: float
    """Of a transfer to a single generator."""
    fixed_s: float
    """Assumed for the pause, the roll call and the digests."""
    is_overlapped: bool = False
    """The trainer computes meanwhile (expert.weights.overlap)."""

    @property
    def whole_seconds(self) -> float:
        """From its beginning until all generators have the version."""
        return self.seconds + self.fixed_s

    def waited_seconds(self, step_seconds: float) -> float:
        """That the trainer waits. step_seconds: that it computes in a step."""
        meanwhile = step_seconds if self.is_overlapped else 0.0
        return max(0.0, self.whole_seconds - meanwhile)


def sync_cost(
    shape: ModelShape,
    config: Config,
    *,
    bytes_per_s: float | None = None,
    fixed_s: float = 0.0,
) -> WeightSyncCost:
    """Bytes and seconds, where each rank sends or receives `bytes_per_s`. Raises InputError.

    No trainer rank sends more than the fullest receiver gets (`exchange/plan.py`), so that the
    slower end is that receiver, or the senders where they are fewer. With reshard each engine hands
    what it receives on to the next one, so n engines take n - 1 rounds longer than one
    (`exchange/transport.py`). Parts of the generators (`expert.weights.groups`) follow each other.
    bytes_per_s: default: `sync_rate`.
    """
    generator, weights = config.generator, config.weights
    rate = sync_rate(weights, bytes_per_s)
    ranks = engine_rank_bytes(shape, generator, ITEM_BYTES[config.model.dtype])
    rounds = max(1, -(-max(ranks) // weights.bucket_bytes))
    one_s = max(max(ranks), sum(ranks) / config.parallel.world_size) / rate
    parts = min(weights.groups, generator.replicas)
    more = (generator.replicas - parts) / rounds if weights.method == "reshard" else 0.0
    return WeightSyncCost(
        total_bytes=generator.replicas * sum(ranks),
        rank_bytes=max(ranks),
        lanes=len(ranks),
        rounds=rounds,
        seconds=one_s * (parts + more),
        one_s=one_s,
        fixed_s=fixed_s,
        is_overlapped=weights.overlap,
    )
