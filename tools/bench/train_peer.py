"""A trainer rank of tools.bench.train: times optimizer steps, ours and the peers' in turn.

Runs under torchrun as `tools.bench.train_peer FOLDER`, written by `children.write_job`. Rank 0
writes a `Measured` to FOLDER/result.json.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.tree import Config, OptimizerConfig
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.forward_backward import output_weight
from megatron_rl.trainer.model.logprobs import OutputLayer, TokenLogprobs, token_logprobs
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.sft import share_of
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.load import unwrap
from tools.bench.children import read_job
from tools.bench.measuring import rotations
from tools.bench.packing import Lengths, magistral_like
from tools.bench.train import (
    MORE_PASSES,
    OURS,
    PACKED,
    PEERS,
    PLAIN,
    Measured,
    Sample,
    Workload,
    check_losses,
    step_flops,
)

GEMM_S = 0.5
WARM_UP = 2
"""Uncounted steps: first the C library returns freed memory to the kernel, which costs a third of
a step's time."""
CHUNKS = 4
"""The logprobs' memory is measured on this number of chunks."""

IGNORED = -100
ROWS = 8
"""Rows of a padded microbatch, the default of transformers' Trainer."""

MEMBERS = 4
"""Members of a group of the objectives."""


def main(cfg: Config, work: Workload) -> None:
    """Set up this rank, time the loops, write a `Measured`."""
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
            (cfg.run.dir / "result.json").write_bytes(msgspec.json.encode(measured))


def lengths_of(work: Workload) -> list[Lengths]:
    if work.tokens is None:
        return magistral_like(work.sequences, seed=1, scale=work.scale)
    totals = np.random.default_rng(1).integers(*work.tokens, work.sequences, endpoint=True)
    return [Lengths(int(total) // 2, int(total) - int(total) // 2) for total in totals]


def gemm_rate(policy: Policy, rows: int) -> float:
    """FLOP/s of a layer's products, each repeated for GEMM_S."""
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
    """Sequences of random tokens; every completion token has equal weight."""
    rng = np.random.default_rng(0)
    total = sum(s.completion for s in lengths)
    return [
        TrainSequence(
            token_ids=rng.integers(0, vocab, s.total).astype(np.int32),
            prompt_length=s.prompt,
            generator_logprobs=np.zeros(s.completion, np.float32),
            version_runs=[(-1, s.completion)],
            advantage=0.0,
            weight=1 / total,
        )
        for s in lengths
    ]


def take_turns(
    loops: dict[str, Callable[[], object]], repeats: int, tokens: int, device: torch.device
) -> list[Sample]:
    """Time steps of all loops in rotating order, without the warm-up."""
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
    """`logprob_peak_over_bound` on CHUNKS chunks of random tokens."""
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
    """Wait until the device is idle."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """The vendor's name of the device."""
    if not is_accelerator(device):
        return device.type
    return torch.get_device_module(device).get_device_name(device)


class PlainLoop:
    """A hand-written loop: transformers and torch's AdamW, with padded or packed microbatches."""

    def __init__(
        self, folder: Path, device: torch.device, cfg: OptimizerConfig, budget_tokens: int
    ) -> None:
        # SDPA: the flash-attention package needs a GPU.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = model.to(device).train()
        self._device = device
        self._cfg = cfg
        self._budget_tokens = budget_tokens
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
        )

    def step(self, sequences: Sequence[TrainSequence], batching: str) -> float:
        """Take an optimizer step; returns the loss before it."""
        loss = self.accumulate(sequences, batching)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.clip_grad_norm)
        self._optimizer.step()
        return loss

    def accumulate(self, sequences: Sequence[TrainSequence], batching: str) -> float:
        """Accumulate the gradient of the mean cross-entropy of completion tokens.

        batching: one of PEERS. Returns the loss.
        """
        self._optimizer.zero_grad()
        total = 0.0
        for rows in self._microbatches(sequences, batching):
            inputs, labels = pack(rows) if batching == PACKED else pad(rows)
            inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
            logits = self._model(**inputs, use_cache=False).logits
            loss = sequences[0].weight * F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(),
                labels[:, 1:].flatten().to(self._device),
                ignore_index=IGNORED,
                reduction="sum",
            )
            loss.backward()
            total += loss.item()
        return total

    def _microbatches(
        self, sequences: Sequence[TrainSequence], batching: str
    ) -> Iterator[list[TrainSequence]]:
        lengths = [len(s.token_ids) for s in sequences]
        if batching == PACKED:
            (chosen,) = deal(lengths, budget_tokens=self._budget_tokens, dp_size=1)
        else:
            order = list(range(len(lengths)))
            chosen = [order[at : at + ROWS] for at in order[::ROWS]]
        return ([sequences[i] for i in microbatch] for microbatch in chosen)


def pad(sequences: Sequence[TrainSequence]) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs, labels), rows padded to the longest; labels have IGNORED outside completions."""
    rows = [_row(sequence) for sequence in sequences]
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    labels = pad_sequence([x for _, x in rows], batch_first=True, padding_value=IGNORED)
    mask = pad_sequence([torch.ones_like(ids) for ids, _ in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}, labels


def pack(sequences: Sequence[TrainSequence]) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs, labels) in one row.

    Without a mask, transformers makes a block-diagonal one from positions that restart.
    """
    rows = [_row(sequence) for sequence in sequences]
    inputs = {
        "input_ids": torch.cat([ids for ids, _ in rows])[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
    }
    return inputs, torch.cat([labels for _, labels in rows])[None]


def _row(sequence: TrainSequence) -> tuple[Tensor, Tensor]:
    """(token ids, labels), both [tokens] int64."""
    ids = torch.from_numpy(sequence.token_ids).long()
    labels = ids.clone()
    labels[: sequence.prompt_length] = IGNORED
    return ids, labels


def objective_loops(
    policy: Policy, cfg: Config, sequences: list[TrainSequence]
) -> dict[str, Callable[[], object]]:
    """By objective: a step of ours, with its earlier passes; groups of MEMBERS."""
    grouped = [
        msgspec.structs.replace(
            sequence, group=n // MEMBERS, member=n % MEMBERS, advantage=(-1.0) ** n
        )
        for n, sequence in enumerate(sequences)
    ]
    share = msgspec.structs.replace(
        share_of(grouped, cfg.train.microbatch_tokens),
        groups=-(-len(grouped) // MEMBERS),
        members=MEMBERS,
    )

    def step(trainer: Trainer) -> None:
        (prepared,) = trainer.prepare([share])
        trainer.update(share, version=0, prepared=prepared)

    loops: dict[str, Callable[[], object]] = {}
    for name, given in ({PLAIN: {}} | MORE_PASSES).items():
        objective = find_objective(AlgorithmConfig.model_validate(given))
        trainer = Trainer(policy, objective, cfg.optimizer, 1000, train=cfg.train)
        loops[name] = partial(step, trainer)
    return loops


def is_accelerator(device: torch.device) -> bool:
    """Whether the device is not the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def peak_extra_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Peak of the allocated bytes during the call, minus those before it.

    On a device: requested bytes, because its allocator rounds large blocks up by up to 1 MiB. On
    CPU: events of torch's allocator, so temporaries inside operators count, and buffers of the math
    library do not.
    """
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        stats = torch.get_device_module(device).memory_stats
        before = stats(device)["requested_bytes.all.current"]
        function()
        torch.accelerator.synchronize(device)
        return stats(device)["requested_bytes.all.peak"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    events = trace.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def logprob_peak_over_bound(hidden: Tensor, targets: Tensor, layer: OutputLayer) -> float:
    """Peak extra memory of logprobs in the forward or the backward pass, over its bound.

    Extra excludes arguments, results and gradients. hidden and the layer's weight must require
    gradients. The weight's gradient is summed in float32, then converted to its dtype.
    """
    results: list[TokenLogprobs] = []

    def forward() -> None:
        results.append(token_logprobs(hidden, targets, layer))

    weight = layer.weight
    handed_on = 0 if weight.dtype == torch.float32 else weight.nbytes
    gradients = hidden.nbytes + 4 * weight.numel() + handed_on
    forward_bytes = peak_extra_bytes(forward, hidden.device)
    loss = results[0].logprobs.sum()
    backward_bytes = peak_extra_bytes(loss.backward, hidden.device) - gradients
    bound = layer.chunk_tokens * len(weight) * 4
    return max(forward_bytes, backward_bytes) / bound


if __name__ == "__main__":
    config, workload = read_job(Workload)
    set_up_logging("bench-train")
    sys.exit(run_main("bench-train", partial(main, config, workload)))
