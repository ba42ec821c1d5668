"""What was measured in tools.bench.train, and its figures.

Shared by its processes; needs neither torch nor Megatron.
"""

import statistics
from collections.abc import Sequence

import msgspec

from megatron_rl.config.gpus import named_peak
from megatron_rl.plan.flops import (
    BACKWARD,
    attention_flops,
    causal_pairs,
    output_flops,
    product_flops,
)
from megatron_rl.weights.layout.shape import ModelShape
from tools.bench.measuring import over
from tools.bench.packing import Lengths

OURS, PADDED, PACKED = "ours", "padded_peer", "packed_peer"
PEERS = (PADDED, PACKED)
PLAIN = "magistral"
MORE_PASSES = {
    "proximal": {"policy_loss": {"old_logprobs": "recompute"}},
    "reference": {"preset": "grpo"},
    "groups": {"preset": "agro"},
    "kl_exact": {
        "kl": {"placement": "loss", "estimator": "exact"},
        "reference": {"policy": "start"},
    },
}
"""Name -> what differs from Magistral: one pass of the policy, one of the reference, one
of each, and one of the reference with the output layer twice."""

LOSS_TOLERANCE = 1e-5
"""Relative; float32 sums in another order differ by 1e-7 to 1e-6."""


class Workload(msgspec.Struct, frozen=True):
    """What a child process is to do."""

    sequences: int
    scale: float
    """Of the lengths."""
    repeats: int
    """Steps of each loop that count, after those that warm up."""
    has_peers: bool
    has_objectives: bool = False
    """Instead of our plain loop: objectives that need more passes, beside one that needs none."""
    tokens: tuple[int, int] | None = None
    """Instead of those lengths: uniform from the first to the second, half of them prompt."""


class Sample(msgspec.Struct, frozen=True):
    """One optimizer step of one loop."""

    loop: str
    seconds: float
    cpu_seconds: float
    """Of this process: what others took of the core does not count."""
    tokens: int
    """Prompt and completion, without padding, over all ranks."""


class Measured(msgspec.Struct, frozen=True):
    """What one child process found."""

    samples: list[Sample]
    """By repeat, the loops of a repeat one after the other."""
    device: str
    step_flops: float
    """Of the model, forward and backward, over all ranks."""
    first_losses: dict[str, float] = {}
    """Of each loop before any step, on the same tokens."""
    logprob_peak_bytes_over_bound: float = 0.0
    gemm_rate: float = 0.0
    """FLOP/s of F.linear alone: the layers' shapes and dtype at the rows of a microbatch."""


def tokens_per_s(samples: Sequence[Sample], loop: str) -> float:
    """Median of the loop's steps."""
    return statistics.median(s.tokens / s.seconds for s in samples if s.loop == loop)


def ratios(samples: Sequence[Sample], loop: str, peer: str, *, of_cpu: bool = False) -> float:
    """Median over repeats of how many times faster `loop` was than `peer` beside it."""

    def seconds(name: str) -> list[float]:
        chosen = [s for s in samples if s.loop == name]
        return [s.cpu_seconds if of_cpu else s.seconds for s in chosen]

    return over(seconds(peer), seconds(loop))


def check_losses(losses: dict[str, float]) -> None:
    """Raises RuntimeError where the loops do not compute the same, so that times say nothing."""
    ours = losses[OURS]
    # Written so that what is no number is refused, too.
    if not all(abs(loss - ours) <= LOSS_TOLERANCE * abs(ours) for loss in losses.values()):
        raise RuntimeError(f"the loops start at different losses: {losses}")


def compare(measured: Measured) -> dict[str, float]:
    """Ours beside its peers."""
    samples = measured.samples
    losses = measured.first_losses
    return {
        **{f"ours_over_{peer}": ratios(samples, OURS, peer) for peer in PEERS},
        **{f"ours_over_{peer}_cpu": ratios(samples, OURS, peer, of_cpu=True) for peer in PEERS},
        **{f"tokens_per_s_{name}": tokens_per_s(samples, name) for name in losses},
        "loss_difference": max(losses.values()) - min(losses.values()),
        "logprob_peak_bytes_over_bound": measured.logprob_peak_bytes_over_bound,
    }


def scaling(rounds: Sequence[dict[str, Measured]]) -> dict[str, float]:
    """How many times faster two ranks were than one, by kind of rank; median over rounds."""
    return {
        f"scaling_{name}": statistics.median(
            tokens_per_s(found[name].samples, OURS) / tokens_per_s(found["one"].samples, OURS)
            for found in rounds
        )
        for name in rounds[0]
        if name != "one"
    }


def step_flops(shape: ModelShape, sequences: Sequence[Lengths]) -> int:
    """FLOPs of an optimizer step: three times a forward pass, without what is computed again.

    Logits count only where a completion token is predicted.
    """
    products = sum(s.total for s in sequences) * product_flops(shape)
    output = sum(s.completion for s in sequences) * output_flops(shape)
    pairs = sum(causal_pairs(s.total, shape.sliding_window) for s in sequences)
    return (1 + BACKWARD) * (products + output + attention_flops(shape, pairs))


def over_gemm(measured: Measured) -> float:
    """Model FLOP/s over what the same process's products reach alone; of the median step."""
    seconds = statistics.median(s.seconds for s in measured.samples)
    return measured.step_flops / seconds / measured.gemm_rate


def mfu(measured: Measured, precision: str) -> float | None:
    """Model FLOP/s over the device's peak; None for a device without a known one."""
    peak = named_peak(measured.device, is_fp8=precision == "fp8")
    if peak is None:
        return None
    return measured.step_flops / statistics.median(s.seconds for s in measured.samples) / peak
