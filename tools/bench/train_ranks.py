"""A trainer rank of tools.bench.train: times optimizer steps, ours and the peers' in turn.

Entry, under torchrun: `python -m tools.bench.train_ranks --config FILE --work FILE`. Rank 0
writes a `Measured` to RUN_DIR/measured.json.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.forward_backward import output_weight
from megatron_rl.trainer.model.logprobs import OutputLayer
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.sft import share_of
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.load import unwrap
from tools.bench.measuring import rotations
from tools.bench.packing import Lengths, magistral_like
from tools.bench.peak_memory import is_accelerator, logprob_peak_over_bound
from tools.bench.train_figures import (
    OURS,
    PEERS,
    Measured,
    Sample,
    Workload,
    check_losses,
    step_flops,
)
from tools.bench.train_peers import PlainLoop, objective_loops

GEMM_S = 0.5
WARM_UP = 2
"""Steps before those that count: until the C library knows how much memory it will need again, and
stops to give it back, which cost a third of a step's time."""
CHUNKS = 4
"""The logprobs' memory is measured on so many times the tokens of a chunk."""


def main(cfg: Config, work: Workload) -> None:
    """Set up this rank, take steps, write what was measured."""
    lengths = lengths_of(work)
    with open_policy(cfg) as policy:
        sequences = make_sequences(lengths, policy.shape.vocab)
        objective = find_objective(AlgorithmConfig(preset="sft"))
        trainer = Trainer(policy, objective, cfg.optimizer, 1000, train=cfg.train)
        share = share_of(sequences, cfg.train.microbatch_tokens)
        loops: dict[str, Callable[[], object]] = {OURS: partial(trainer.update, share, version=0)}
        if work.has_objectives:
            loops = objective_loops(policy, cfg, sequences)
        losses: dict[str, float] = {}
        if work.has_peers:
            losses[OURS] = trainer.accumulate(share, version=0).sums["loss"]
            peer = PlainLoop(
                cfg.model.path, policy.device, cfg.optimizer, cfg.train.microbatch_tokens
            )
            for name in PEERS:
                loops[name] = partial(peer.step, sequences, name)
                losses[name] = peer.accumulate(sequences, name)
            check_losses(losses)
        tokens = sum(s.total for s in lengths)
        measured = Measured(
            samples=take_turns(loops, work.repeats, tokens, policy.device),
            device=device_name(policy.device),
            step_flops=step_flops(policy.shape, lengths),
            first_losses=losses,
            logprob_peak_bytes_over_bound=logprob_peak(policy, cfg) if work.has_peers else 0.0,
            gemm_rate=gemm_rate(policy, tokens // len(share.microbatches)),
        )
        if dist.get_rank() == 0:
            (cfg.run.dir / "measured.json").write_bytes(msgspec.json.encode(measured))


def lengths_of(work: Workload) -> list[Lengths]:
    """Of the workload's sequences."""
    if work.tokens is None:
        return magistral_like(work.sequences, seed=1, scale=work.scale)
    totals = np.random.default_rng(1).integers(*work.tokens, work.sequences, endpoint=True)
    return [Lengths(int(total) // 2, int(total) - int(total) // 2) for total in totals]


def gemm_rate(policy: Policy, rows: int) -> float:
    """FLOP/s of a layer's products one after the other, each repeated for a while."""
    shape = policy.shape
    dtype = next(policy.chunks[0].parameters()).dtype
    width = shape.heads * shape.head_dim
    heads = width + 2 * shape.kv_heads * shape.head_dim
    sizes = [(shape.hidden, heads), (width, shape.hidden)]
    sizes += [(shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)]
    seconds = 0.0
    for inputs, outputs in sizes:
        x, weight = (
            torch.randn(n, inputs, dtype=dtype, device=policy.device) for n in (rows, outputs)
        )
        torch.nn.functional.linear(x, weight)
        wait(policy.device)
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < GEMM_S:
            torch.nn.functional.linear(x, weight)
            wait(policy.device)
            count += 1
        seconds += (time.perf_counter() - started) / count
    return sum(2 * rows * inputs * outputs for inputs, outputs in sizes) / seconds


def make_sequences(lengths: list[Lengths], vocab: int) -> list[TrainSequence]:
    """Random tokens; every completion token weighs the same."""
    rng = np.random.default_rng(0)
    total = sum(s.completion for s in lengths)
    return [
        TrainSequence(
            token_ids=rng.integers(0, vocab, s.total).astype(np.int32),
            prompt_length=s.prompt,
            generator_logprobs=np.zeros(s.completion, np.float32),
            token_versions=np.full(s.completion, -1, np.int32),
            advantage=0.0,
            weight=1 / total,
        )
        for s in lengths
    ]


def take_turns(
    loops: dict[str, Callable[[], object]], repeats: int, tokens: int, device: torch.device
) -> list[Sample]:
    """Steps of all loops in an order that rotates; the first of each do not count."""
    samples = []
    for repeat, names in enumerate(rotations(list(loops), WARM_UP + repeats)):
        for name in names:
            wait(device)
            started, cpu_started = time.perf_counter(), time.process_time()
            loops[name]()
            wait(device)
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
            if repeat >= WARM_UP:
                samples.append(Sample(name, seconds, cpu_s, tokens))
    return samples


def logprob_peak(policy: Policy, cfg: Config) -> float:
    """Most extra memory of logprobs over its bound, on many chunks of random tokens."""
    weight = output_weight(unwrap(policy.chunks[-1])).detach().requires_grad_()
    chunk_tokens = cfg.train.logprob_chunk_tokens
    group = parallel_state.get_tensor_model_parallel_group()
    layer = OutputLayer(weight, policy.shape.vocab, group, 1.0, chunk_tokens)
    n_tokens = CHUNKS * chunk_tokens
    hidden = torch.randn(n_tokens, weight.shape[1], device=policy.device, dtype=weight.dtype)
    hidden.requires_grad_()
    targets = torch.randint(0, policy.shape.vocab, (n_tokens,), device=policy.device)
    return logprob_peak_over_bound(hidden, targets, layer)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """As the vendor calls it."""
    if not is_accelerator(device):
        return device.type
    return torch.get_device_module(device).get_device_name(device)


def start() -> int:
    """Entry of a rank."""
    parser = argparse.ArgumentParser(description="rank of tools.bench.train, under torchrun")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    cfg = load_config(options.config, [])
    work = msgspec.json.decode(options.work.read_bytes(), type=Workload)
    set_up_logging("bench-train")
    return run_main("bench-train", partial(main, cfg, work))


if __name__ == "__main__":
    sys.exit(start())
