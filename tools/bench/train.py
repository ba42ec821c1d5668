"""Cost of an optimizer step: `python -m tools.bench.train [--quick] [--repeats N] [--gpu-only]`.

Compares our trainer with hand-written loops on the same random model and tokens, in one process
with one thread. The lengths are Magistral's over 32 (tools/bench/packing.py; --quick: over 64, and
a smaller model). Loops take turns; tokens count without padding.

| loop | meaning |
|---|---|
| ours | megatron_rl.trainer.step: packed microbatches, float32 |
| padded_peer | transformers and torch's AdamW; 8 rows in order of arrival, like its Trainer |
| packed_peer | the same, packed like ours: positions restart, SDPA with a block-diagonal mask |

| figure | meaning; medians |
|---|---|
| ours_over_* | ratio of tokens/s of the same repeat |
| ..._cpu | the same by processor time, which a busy machine does not change |
| scaling_tp2, scaling_dp2 | tokens/s of two ranks over one |
| logprob_peak_bytes_over_bound | memory of logprobs, forward and backward, beyond the gradients |
| loss_difference | between the loops before any step; above 1e-5 of the loss the benchmark fails |
| achieved_over_gemm_* | model FLOP/s of our step over gemm_rate, one thread |
| gemm_rate_gflops* | F.linear on the layers' shapes, in the same process |
| cost_of_* | a step with more passes (`MORE_PASSES`) over one of Magistral's |
| mfu_bf16, mfu_fp8 | on GPU: model FLOP/s over the device's peak, on a larger model |

achieved_over_gemm_* and gemm_rate_gflops* use SmolLM2-135M's sizes, in float32 and bfloat16, and
the 1.3M model of tools.make_tiny_model with many short sequences.

busy_share is other processes' share of the cores before the steps: unless it is near 0, wall clocks
say little. The last line is one JSON object.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.backend.environment import ranks_environment
from megatron_rl.config.gpus import named_peak
from megatron_rl.config.tree import Config
from megatron_rl.plan.flops import BACKWARD, causal_flops, output_flops, product_flops
from megatron_rl.weights.layout.shape import ModelShape
from tools.bench.children import (
    SMOLLM2,
    TINY,
    llama,
    rank_environment,
    run_ranks,
    write_job,
    write_model,
)
from tools.bench.measuring import busy_share, over, parser, run
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
"""Name -> difference from Magistral: a pass of the policy, one of the reference, one of each, and
one of the reference with the output layer twice."""

LOSS_TOLERANCE = 1e-5
"""Relative; float32 sums in another order differ by 1e-7 to 1e-6."""

TIMEOUT_S = 3600.0
GPU_TIMEOUT_S = 600.0
SCALING = {"one": {}, "tp2": {"tensor": 2}, "dp2": {"data": 2}}


class Workload(msgspec.Struct, frozen=True):
    """Work of a sub-process."""

    sequences: int
    scale: float
    """Factor of the lengths."""
    repeats: int
    """Counted steps of each loop, after the warm-up."""
    has_peers: bool
    has_objectives: bool = False
    """Measure objectives with more passes, and one without, instead of our plain loop."""
    tokens: tuple[int, int] | None = None
    """Uniform lengths in this range, half of them prompt, instead of Magistral's."""


class Sample(msgspec.Struct, frozen=True):
    """One optimizer step of one loop."""

    loop: str
    seconds: float
    cpu_seconds: float
    """Processor time of this process."""
    tokens: int
    """Prompt and completion, without padding, over all ranks."""


class Measured(msgspec.Struct, frozen=True):
    """Measurements of a sub-process."""

    samples: list[Sample]
    """In the order of the steps."""
    device: str
    step_flops: float
    """Model FLOP, forward and backward, over all ranks."""
    first_losses: dict[str, float] = {}
    """Loss of each loop before any step, on the same tokens."""
    logprob_peak_bytes_over_bound: float = 0.0
    gemm_rate: float = 0.0
    """FLOP/s of F.linear with the layers' shapes and dtype, and the rows of a microbatch."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a benchmark."""

    model: dict[str, Any]
    """Arguments of LlamaConfig."""
    work: Workload
    microbatch_tokens: int
    rounds: int


FULL = Scale(
    model=llama(32_768, 576, 1536, 10, (12, 4)),
    work=Workload(sequences=12, scale=1 / 32, repeats=5, has_peers=True),
    microbatch_tokens=2048,
    rounds=2,
)
QUICK = Scale(
    model=llama(8192, 256, 704, 8, (8, 2)),
    work=Workload(sequences=24, scale=1 / 64, repeats=3, has_peers=True),
    microbatch_tokens=1024,
    rounds=1,
)
LIMITS = {
    "135m": (SMOLLM2, "float32", Workload(8, 1, 3, has_peers=False, tokens=(60, 420)), 2048),
    "1_3m": (TINY, "float32", Workload(256, 1, 20, has_peers=False, tokens=(18, 26)), 8192),
    # As the quickstart's batches are.
    "135m_bf16": (SMOLLM2, "bfloat16", Workload(64, 1, 4, has_peers=False, tokens=(36, 54)), 2048),
}
"""Name -> model, dtype, work and microbatch tokens, for achieved_over_gemm_*."""
QUICK_REPEATS = 1

GPU = Scale(
    model=llama(131_072, 2048, 8192, 24, (16, 8)),
    work=Workload(sequences=32, scale=1 / 4, repeats=5, has_peers=False),
    # By `megatron-rl plan`, twice as many fill a GPU of 80 GB; the longest sequence has 7,436.
    microbatch_tokens=8192,
    rounds=0,
)
PRECISIONS = {
    "bf16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "fp8": "tensorwise"},
}
"""Name -> model settings of mfu_*."""


def main() -> int:
    made = parser(__doc__, quick="a smaller model, fewer tokens", repeats="steps of each loop")
    made.add_argument("--gpu-only", action="store_true", help="mfu_bf16 and mfu_fp8, nothing else")
    options = made.parse_args()
    return run("train", options, partial(measure_all, options))


def measure_all(options: argparse.Namespace, folder: Path, cores: list[int]) -> dict[str, Any]:
    """All figures. Raises ChildFailed."""
    if options.gpu_only:
        return on_gpu(folder / "gpu")
    scale = QUICK if options.quick else FULL
    if options.repeats:
        scale = replace(scale, work=msgspec.structs.replace(scale.work, repeats=options.repeats))
    write_model(folder / "model", scale.model)
    conditions = {
        "repeats": scale.work.repeats,
        "busy_share": busy_share(cores),
        "sequences": scale.work.sequences,
        "microbatch_tokens": scale.microbatch_tokens,
    }
    found = compare(measure(folder / "peers", folder / "model", scale))
    rounds = [run_round(folder / f"round-{n}", folder, scale) for n in range(scale.rounds)]
    found |= objectives(folder, scale) | scaling(rounds)
    found |= against_gemm(folder / "limits", is_quick=options.quick)
    return conditions | found | on_gpu(folder / "gpu")


def run_round(run_dir: Path, folder: Path, scale: Scale) -> dict[str, Measured]:
    """Our loop alone, on one rank and on two."""
    scale = replace(scale, work=msgspec.structs.replace(scale.work, has_peers=False))
    return {
        name: measure(run_dir / name, folder / "model", scale, parallel)
        for name, parallel in SCALING.items()
    }


def objectives(folder: Path, scale: Scale) -> dict[str, float]:
    """cost_of_* on one rank."""
    work = msgspec.structs.replace(scale.work, has_peers=False, has_objectives=True)
    samples = measure(folder / "objectives", folder / "model", replace(scale, work=work)).samples
    return {f"cost_of_{name}": ratios(samples, PLAIN, name, of_cpu=True) for name in MORE_PASSES}


def against_gemm(folder: Path, *, is_quick: bool) -> dict[str, float]:
    """gemm_rate_gflops* and achieved_over_gemm_* by model and dtype."""
    found: dict[str, float] = {}
    for name, (model, dtype, work, budget) in LIMITS.items():
        write_model(folder / name / "model", model)
        if is_quick:
            work = msgspec.structs.replace(work, repeats=QUICK_REPEATS)
        scale = Scale(model, work, microbatch_tokens=budget, rounds=0)
        measured = measure(
            folder / name / "run", folder / name / "model", scale, model={"dtype": dtype}
        )
        suffix = "" if name == "135m" else f"_{name}"
        found[f"gemm_rate_gflops{suffix}"] = measured.gemm_rate / 1e9
        found[f"achieved_over_gemm_{name}"] = over_gemm(measured)
    return found


def on_gpu(folder: Path) -> dict[str, float | None]:
    """mfu_bf16 and, with TransformerEngine, mfu_fp8; {} without a GPU."""
    import torch

    if not torch.accelerator.is_available():
        return {}
    write_model(folder / "model", GPU.model)
    environment = gpu_environment()
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    found = {}
    for name, model in PRECISIONS.items():
        if name != "fp8" or has_engine:
            run_dir = folder / name
            measured = measure(run_dir, folder / "model", GPU, model=model, environment=environment)
            found[f"mfu_{name}"] = mfu(measured, name)
    return found


def gpu_environment() -> dict[str, str]:
    """Variables of a rank on this machine's GPUs: those of a run's trainer ranks, and PYTHONPATH.

    `rank_environment` hides the GPUs and sets one thread.
    """
    given = rank_environment()
    ours = {name: given[name] for name in ("PYTHONPATH", "MEGATRON_RL_LAUNCHED", "HF_HUB_OFFLINE")}
    return ours | ranks_environment("cuda", 1, expandable_segments=True)


def measure(
    run_dir: Path,
    model_folder: Path,
    scale: Scale,
    parallel: dict[str, int] | None = None,
    model: dict[str, Any] | None = None,
    *,
    environment: dict[str, str] | None = None,
) -> Measured:
    """Run train_peer, a sub-process per rank. Raises ChildFailed.

    environment: `gpu_environment`; None: CPU.
    """
    cfg = make_config(run_dir, model_folder, scale, parallel, model)
    return run_ranks(
        "tools.bench.train_peer",
        write_job(cfg, scale.work),
        Measured,
        ranks=cfg.parallel.world_size,
        timeout_s=TIMEOUT_S if environment is None else GPU_TIMEOUT_S,
        environment=environment,
    )


def make_config(
    run_dir: Path,
    model_folder: Path,
    scale: Scale,
    parallel: dict[str, int] | None = None,
    model: dict[str, Any] | None = None,
) -> Config:
    """Configuration of the ranks; model: settings besides the folder."""
    return Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"path": model_folder, "dtype": "float32"} | (model or {}),
            "parallel": parallel or {},
            "optimizer": {"lr": 1e-5, "warmup_steps": 0},
            "train": {
                "microbatch_tokens": scale.microbatch_tokens,
                "collective_timeout_s": TIMEOUT_S,
            },
        }
    )


def tokens_per_s(samples: Sequence[Sample], loop: str) -> float:
    """Median over the loop's steps."""
    return statistics.median(s.tokens / s.seconds for s in samples if s.loop == loop)


def ratios(samples: Sequence[Sample], loop: str, peer: str, *, of_cpu: bool = False) -> float:
    """Median speed-up of `loop` over `peer` in the same repeat."""

    def seconds(name: str) -> list[float]:
        chosen = [s for s in samples if s.loop == name]
        return [s.cpu_seconds if of_cpu else s.seconds for s in chosen]

    return over(seconds(peer), seconds(loop))


def check_losses(losses: dict[str, float]) -> None:
    """Raise RuntimeError when the loops compute different losses."""
    ours = losses[OURS]
    # `not all(<=)` refuses NaN too.
    if not all(abs(loss - ours) <= LOSS_TOLERANCE * abs(ours) for loss in losses.values()):
        raise RuntimeError(f"the loops start at different losses: {losses}")


def compare(measured: Measured) -> dict[str, float]:
    """Figures of ours and its peers."""
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
    """Speed-up of two ranks over one, median over rounds."""
    return {
        f"scaling_{name}": statistics.median(
            tokens_per_s(found[name].samples, OURS) / tokens_per_s(found["one"].samples, OURS)
            for found in rounds
        )
        for name in rounds[0]
        if name != "one"
    }


def step_flops(shape: ModelShape, sequences: Sequence[Lengths]) -> int:
    """FLOPs of an optimizer step: three forward passes, without recomputation.

    Logits count only for completion tokens.
    """
    products = sum(s.total for s in sequences) * product_flops(shape)
    output = sum(s.completion for s in sequences) * output_flops(shape)
    attention = sum(causal_flops(shape, s.total) for s in sequences)
    return (1 + BACKWARD) * (products + output + attention)


def over_gemm(measured: Measured) -> float:
    """Model FLOP/s of the median step over gemm_rate."""
    return _flops_per_s(measured) / measured.gemm_rate


def mfu(measured: Measured, precision: str) -> float | None:
    """Model FLOP/s over the device's peak; None for an unknown device."""
    peak = named_peak(measured.device, is_fp8=precision == "fp8")
    return None if peak is None else _flops_per_s(measured) / peak


def _flops_per_s(measured: Measured) -> float:
    return measured.step_flops / statistics.median(s.seconds for s in measured.samples)


if __name__ == "__main__":
    sys.exit(main())
