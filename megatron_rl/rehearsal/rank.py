"""One trainer rank takes one whole step of the product's own trainer, on tensors without data.

Runs in a process of its own for each rank (`ranks.py`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules import module as torch_module

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.backend.fp8 import POSITION_MULTIPLE
from megatron_rl.config.tree import Config
from megatron_rl.protocol.rollout import narrow_choices
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.rehearsal import observed
from megatron_rl.rehearsal.device import DEVICE, install_collectives, select_rehearsed
from megatron_rl.rehearsal.events import PASSES, Trace
from megatron_rl.rehearsal.rehearse import engine_ranks, rank_name
from megatron_rl.rehearsal.tracer import Tracer
from megatron_rl.rehearsal.weight_sync import receive_weights, send_weights
from megatron_rl.trainer.forward_backward import ForwardStep, PassInputs
from megatron_rl.trainer.model.build import build_model
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.step import Totals, Trainer
from megatron_rl.weights.layout.shape import ModelShape

BETWEEN = "step"


@dataclass(frozen=True)
class Work:
    """What each data-parallel rank trains on."""

    microbatches: int
    tokens: int
    """Of a microbatch, over all context ranks."""
    sequence_tokens: int
    """Of each sequence; the last of a microbatch is shorter."""


def rehearse_rank(
    cfg: Config,
    shape: ModelShape,
    rank: int,
    work: Work,
    *,
    change: Callable[["TracedTrainer", Work], Work] = lambda trainer, work: work,
) -> Trace:
    """The trace of one rank's weight sync and step. Changes torch for the whole process.

    change: called with the trainer before both; returns the rank's work.
    """
    started = time.monotonic()
    backend = select_rehearsed(cfg.model, rank)
    backend.init_distributed(cfg.parallel, seed=cfg.run.seed, timeout_s=60)
    tracer = Tracer(DEVICE)
    observed.add_flops, observed.read_lengths = tracer.add_flops, tracer.lengths
    # A host that waits for the device waits for all that it has issued.
    torch.cuda.synchronize = lambda device=None: tracer.note_waits()
    observed.know, observed.in_purpose = tracer.know, tracer.memory.in_purpose
    with tracer, batches_marked(tracer), modules_named(tracer):
        with tracer.in_phase("build"):
            tracer.memory.purpose = "weights and gradients"
            chunks = build_model(backend, cfg, shape)
            policy = Policy(backend, shape, chunks, cfg.parallel, cfg)
            tracer.memory.purpose = "optimizer"
            trainer = TracedTrainer(policy, cfg, tracer)
        tracer.received = _sizes_of(policy, work)
        # Megatron's routers pad the rows of each expert for products in FP8.
        multiple = POSITION_MULTIPLE if cfg.model.fp8 != "none" else 1
        tracer.assumed = partial(_even_choices, shape, multiple)
        tracer.selected = partial(_chosen_rows, shape, multiple)
        # The first step of an optimizer makes its moments.
        trainer.take(share_of(replace(work, microbatches=policy.microbatch_multiple), cfg, shape))
        tracer.begin_again()
        work = change(trainer, work)
        # Before the step, as its buffers stay.
        syncer = send_weights(cfg, policy, tracer) if engine_ranks(cfg) else None
        trainer.take(share_of(work, cfg, shape))
        del syncer
    return tracer.trace(
        rank,
        rank_name(cfg, rank),
        microbatches=trainer.microbatches,
        parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
        seconds=time.monotonic() - started,
    )


def rehearse_engine_rank(
    cfg: Config, shape: ModelShape, number: int, *, change: Callable[[int], None]
) -> Trace:
    """The trace of an engine rank's weight sync. Changes torch for the whole process.

    number: as in Trace.rank. change: called with it before the weight sync.
    """
    started = time.monotonic()
    install_collectives()
    tracer = Tracer(DEVICE)
    with tracer, batches_marked(tracer):
        change(number)
        parameters = receive_weights(cfg, shape, number, tracer)
    return tracer.trace(
        number,
        rank_name(cfg, number),
        microbatches=None,
        parameters=parameters,
        seconds=time.monotonic() - started,
    )


class TracedTrainer(Trainer):
    """The product's trainer, which tells the tracer its phases."""

    def __init__(self, policy: Policy, cfg: Config, tracer: Tracer) -> None:
        objective = find_objective(cfg.algorithm)
        train = cfg.train.model_copy(update={"profile_steps": (), "max_mismatch": 0})
        super().__init__(policy, objective, cfg.optimizer, 100, train=train)
        self._tracer = tracer
        self.microbatches = 0
        """Of the last step."""
        self._passes.forward_backward = self._traced(self._passes.forward_backward)

    def _traced(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        def take(inputs: PassInputs, step: ForwardStep, *, is_training: bool) -> Any:
            if is_training:
                self.microbatches = len(inputs)
            with self._tracer.in_phase(PASSES):
                return forward_backward(inputs, step, is_training=is_training)

        return take

    def take(self, minibatch: MinibatchShare) -> None:
        """One step on one minibatch, as `train.take_step` does it."""
        with self._tracer.in_phase("prepare"):
            prepared = self.prepare([minibatch])
        with self._tracer.in_phase(BETWEEN):
            self._tracer.memory.purpose = "optimizer"
            self.update(minibatch, version=0, prepared=prepared.pop())
            self.gather()

    def accumulate(self, *args: Any, **kwargs: Any) -> Totals:
        """As the trainer's. Names the purpose of what it allocates."""
        self._tracer.memory.purpose = "batch, exchanged tensors, gradients of activations"
        totals = super().accumulate(*args, **kwargs)
        self._tracer.memory.purpose = "optimizer"
        return totals


def share_of(work: Work, cfg: Config, shape: ModelShape) -> MinibatchShare:
    """Full microbatches of sequences of equal lengths, in groups of one."""
    width = cfg.train.router_replay * shape.layers * shape.experts_per_token
    rows = []
    for _ in range(work.microbatches):
        left = work.tokens
        row: list[TrainSequence] = []
        while left:
            length = min(work.sequence_tokens, left)
            # Two tokens are the fewest that predict anything.
            if left - length == 1:
                length -= 1
            # Distinct for each token of a layer, and even over the experts.
            choices = np.arange((length - 1) * width, dtype=np.int32) % max(1, shape.experts)
            row.append(_sequence(length, len(row), choices))
            left -= length
        rows.append(row)
    count = max(map(len, rows))
    return MinibatchShare(rows, groups=count, members=1, temperature=cfg.sampling.temperature)


def _sequence(length: int, group: int, choices: np.ndarray) -> TrainSequence:
    prompt = max(1, length // 8)
    completion = length - prompt
    return TrainSequence(
        np.zeros(length, np.int32),
        prompt,
        np.zeros(completion, np.float32),
        [(0, completion)],
        advantage=1.0,
        weight=1.0,
        group=group,
        expert_choices=narrow_choices(choices),
    )


def _sizes_of(policy: Policy, work: Work) -> Callable[[Tensor], Tensor | None]:
    """The sizes that another pipeline stage sends: all microbatches have the same."""
    parallel = policy.parallel
    positions = policy.fixed_positions or work.tokens + -work.tokens % policy.position_multiple
    positions //= parallel.context
    if policy.has_sequence_parallelism:
        positions //= parallel.tensor
    sizes = torch.tensor([positions, 1, policy.shape.hidden])

    def received(tensor: Tensor) -> Tensor | None:
        return sizes if tensor.dtype is torch.int64 and tensor.numel() == 3 else None

    return received


def _even_choices(
    shape: ModelShape, multiple: int, func: Any, args: tuple[Any, ...]
) -> Tensor | None:
    """Tokens of each expert from the map of choices, [tokens, experts] bool: all have as many."""
    if func is not torch.ops.aten.sum.dim_IntList or args[0].dtype is not torch.bool:
        return None
    if args[0].dim() != 2 or args[0].shape[1] != shape.experts or list(args[1]) != [0]:
        return None
    return torch.tensor(_rows_of_experts(shape, len(args[0]), multiple))


def _chosen_rows(shape: ModelShape, multiple: int, mask: Tensor) -> int:
    """Rows for experts that the map of choices, [experts, tokens] bool, selects."""
    assert mask.dim() == 2 and len(mask) == shape.experts, "only experts select by unknown values"
    return sum(_rows_of_experts(shape, mask.shape[1], multiple))


def _rows_of_experts(shape: ModelShape, tokens: int, multiple: int) -> list[int]:
    each, rest = divmod(tokens * shape.experts_per_token, shape.experts)
    rows = [each + (expert < rest) for expert in range(shape.experts)]
    return [min(count + -count % multiple, tokens) for count in rows]


@contextmanager
def batches_marked(tracer: Tracer) -> Iterator[None]:
    """Within the block the tracer knows which sends and receives are issued at once."""
    original = dist.batch_isend_irecv

    def issue(operations: Sequence[dist.P2POp]) -> list[Any]:
        with tracer.batch():
            return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]

    dist.batch_isend_irecv = issue
    try:
        yield
    finally:
        dist.batch_isend_irecv = original


@contextmanager
def modules_named(tracer: Tracer) -> Iterator[None]:
    """Within the block memory of a forward pass belongs to the module that allocates it."""
    stack: list[str] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        stack.append(tracer.memory.purpose)
        tracer.memory.purpose = f"passes: {type(module).__name__}"

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        tracer.memory.purpose = stack.pop()

    hooks = [
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
