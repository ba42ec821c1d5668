"""What a weight sync moves, and how long it takes. Pure; used by plans and simulations."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.generator import GeneratorConfig, WeightsConfig
from megatron_rl.plan.generator import engine_rank_bytes
from megatron_rl.weights.layout.copies import turns_before
from megatron_rl.weights.layout.shape import ModelShape

NCCL_BYTES_PER_S, HOST_BYTES_PER_S = 25e9, 2e9
"""That one rank is taken to send or receive in a weight sync: over NCCL, and by way of host memory
and TCP (`weights.method = "host"`). Estimates: neither has been timed between GPUs."""


def sync_rate(weights: WeightsConfig, given: float | None = None) -> float:
    """Bytes/s of one rank in a weight sync; given: what somebody knows of it."""
    if given is not None:
        return given
    return HOST_BYTES_PER_S if weights.method == "host" else NCCL_BYTES_PER_S


RELAY_WORTH = 0.05
"""Share of a step that expert.weights.relay must save to be advised."""
PAPER_WEIGHT_SYNC_S = 5.0
"""In less weights reach the generators, even of large models. Source: Magistral (2506.10910)."""


@dataclass(frozen=True)
class WeightSyncCost:
    """What one weight sync to all generators moves, over NCCL or by way of host memory."""

    total_bytes: int
    rank_bytes: int
    """Most that a rank of an engine takes."""
    copies: int
    """Of the model in the trainer; they serve generators at the same time."""
    group_ranks: int
    """Of a copy and an engine."""
    turns: int
    """Transfers, one after the other, until all generators are served: by the busiest copy, or with
    `is_relayed` also by those that hold the version."""
    is_relayed: bool
    """Generators pass weights on (expert.weights.relay)."""
    seconds: float
    """Of the transfers of all turns; digests and pauses are not counted."""
    turn_s: float
    """Assumed for a turn beside its transfer."""
    least_seconds: float
    """Of the transfers, if the trainer's ranks alone sent, all of the time: their bandwidth."""
    is_overlapped: bool = False
    """The trainer computes meanwhile (expert.weights.overlap)."""

    @property
    def whole_seconds(self) -> float:
        """From its beginning until all generators have the version."""
        return self.seconds + self.turns * self.turn_s

    def waited_seconds(self, step_seconds: float) -> float:
        """That the trainer waits. step_seconds: that it computes in a step."""
        beside = step_seconds if self.is_overlapped else 0.0
        return max(0.0, self.whole_seconds - beside)

    def relay_advice(self, step_s: float) -> list[str]:
        """What expert.weights.relay would save, where that is worth longer pauses of the engines.

        step_s: seconds of a step.
        """
        turns = turns_before(self.turns)
        saved_s = self.whole_seconds * (1 - turns / self.turns)
        if self.is_relayed or saved_s < RELAY_WORTH * step_s:
            return []
        return [
            f"a weight sync takes {self.whole_seconds:.1f} s: with expert.weights.relay=true "
            f"engines pass weights on, in {turns} turns instead of {self.turns}, "
            f"{turns * self.whole_seconds / self.turns:.1f} s"
        ]


def sync_cost(
    shape: ModelShape,
    generator: GeneratorConfig,
    weights: WeightsConfig,
    *,
    copies: Sequence[Sequence[int]],
    item_bytes: int,
    bytes_per_s: float | None = None,
    turn_s: float = 0.0,
) -> WeightSyncCost:
    """Bytes and seconds, where each rank sends or receives `bytes_per_s`. Raises InputError.

    copies: the trainer's ranks of each. Those of a copy share its work evenly (`make_plan`), so
    that the slower end of a transfer is the fullest receiver, or the senders where they are fewer.
    bytes_per_s: default: `sync_rate`.
    """
    rate = sync_rate(weights, bytes_per_s)
    ranks = engine_rank_bytes(shape, generator, item_bytes)
    senders = len(copies[0])
    served = -(-generator.replicas // len(copies))
    # Over NCCL a copy serves its engines one after the other: see weights/sync/members.py.
    at_once = served if weights.method == "host" else 1
    turns = turns_before(served) if weights.relay else -(-served // at_once)

    def seconds(engines: int) -> float:
        """Of the transfers to so many engines of a copy at once."""
        return max(max(ranks), engines * sum(ranks) / senders) / rate

    return WeightSyncCost(
        total_bytes=generator.replicas * sum(ranks),
        rank_bytes=max(ranks),
        copies=len(copies),
        group_ranks=senders + len(ranks),
        turns=turns,
        is_relayed=weights.relay,
        seconds=turns * seconds(at_once),
        turn_s=turn_s,
        least_seconds=seconds(served),
        is_overlapped=weights.overlap,
    )
