"""One optimizer step over packed microbatches.

Runs in trainer ranks; the same for reinforcement learning and supervised fine-tuning.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.collate import MicroBatch, collate
from megatron_rl.logprobs import token_logprobs
from megatron_rl.loss import LossFunction, LossInputs
from megatron_rl.model import packed_params
from megatron_rl.optimizer import StepResult, build_optimizer, lr_at, step_if_finite, zero_gradients
from megatron_rl.policy import Policy
from megatron_rl.protocol.config import LossConfig, OptimizerConfig
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.router_replay import forget_choices, replayed

_SUMS = ("loss", "clipped", "entropy", "tokens", "gap", "gap_tokens", "positions")


@dataclass(frozen=True)
class Objective:
    """What an update minimises."""

    function: LossFunction
    cfg: LossConfig
    temperature: float = 1.0
    """Sampling temperature of the generators; the trainer's logits are divided by it too."""
    replays_experts: bool = False
    """Sequences carry the generator's expert choices, and tokens go to those experts."""


class Trainer:
    """A policy, its optimizer and its objective."""

    def __init__(
        self, policy: Policy, objective: Objective, optimizer: OptimizerConfig, total_steps: int
    ) -> None:
        """total_steps: optimizer steps of the whole phase, for the learning-rate schedule."""
        self.policy = policy
        self._objective = objective
        self._optimizer_cfg = optimizer
        self._total_steps = total_steps
        self._steps_done = 0
        # Copies float32 masters: the weights must be loaded by now.
        self._optimizer = build_optimizer(optimizer, policy.chunks)
        shape = policy.shape
        self._choice_width = objective.replays_experts * shape.layers * shape.experts_per_token
        self._forward_backward = get_forward_backward_func()

    def update(self, minibatch: MinibatchShare, *, version: int) -> list[Metric]:
        """One optimizer step; collective over all trainer ranks.

        version: policy version that is being trained from; tokens sampled under it measure the
        gap between trainer and generator logprobs, before the update. A step whose gradient is
        not finite is skipped and counted.
        """
        started = time.monotonic()
        sums = self.accumulate(minibatch, version=version)
        lr = lr_at(self._steps_done, self._optimizer_cfg, self._total_steps)
        result = step_if_finite(self._optimizer, lr=lr)
        self._steps_done += 1
        seconds = time.monotonic() - started
        return [
            *_metrics(sums, result),
            Metric("train/lr", lr),
            *_speed(sums["positions"], seconds),
        ]

    def accumulate(self, minibatch: MinibatchShare, *, version: int) -> dict[str, float]:
        """Gradient of a minibatch, left in the gradient buffers; returns sums over all ranks."""
        multiple = self.policy.position_multiple
        width = self._choice_width
        microbatches = [
            collate(s, multiple=multiple, choice_width=width) for s in minibatch.microbatches
        ]
        zero_gradients(self.policy.chunks, self._optimizer)
        forget_choices(self.policy.chunks)
        device = self.policy.device
        reports = self._forward_backward(
            forward_step_func=partial(self._forward_step, version),
            data_iterator=iter([m.to(device) for m in microbatches]),
            model=self.policy.chunks,
            num_microbatches=len(microbatches),
            seq_length=max(m.tokens.shape[1] for m in microbatches),
            micro_batch_size=1,
            forward_only=False,
        )
        local = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
            local += torch.stack(reports).sum(0)
        # One reduction for all metrics; only last stages hold reports.
        dist.all_reduce(local)
        return dict(zip(_SUMS, local.tolist(), strict=True))

    def _forward_step(
        self, version: int, microbatches: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[Tensor, partial]:
        batch = next(microbatches)
        packed = packed_params(batch.sequence_starts, batch.longest)
        replay = replayed(
            model,
            batch.expert_choices,
            topk=self.policy.shape.experts_per_token,
            share=self.policy.position_share,
        )
        with replay, self._only_rows(batch.rows):
            output = model(batch.tokens, batch.position_ids, None, packed_seq_params=packed)
        return output, partial(self._loss, batch, version)

    @contextmanager
    def _only_rows(self, rows: Tensor) -> Iterator[None]:
        """Compute logits only where a completion token is predicted.

        The output layer of a small model with a large vocabulary is a good part of its work.
        """
        layer = self.policy.output_layer
        if layer is None or self.policy.has_sequence_parallelism:
            # Under sequence parallelism the layer sees a slice of the positions only.
            yield
            return
        hook = layer.register_forward_pre_hook(lambda _, args: (args[0][rows], *args[1:]))
        try:
            yield
        finally:
            hook.remove()

    def _loss(
        self, batch: MicroBatch, version: int, output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = output[0][batch.rows] if self.policy.has_sequence_parallelism else output[0]
        values = token_logprobs(
            logits,
            batch.targets,
            vocab_size=self.policy.shape.vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=self._objective.temperature,
        )
        inputs = LossInputs(
            values.logprobs, batch.generator_logprobs, batch.advantages, batch.weights
        )
        result = self._objective.function(inputs, self._objective.cfg)
        with torch.no_grad():
            # A loss weight of 0 marks placeholders only.
            is_real = batch.weights > 0
            is_current = is_real & (batch.versions == version)
            gap = (values.logprobs - batch.generator_logprobs).abs()
            report = torch.stack(
                [
                    result.loss,
                    result.clipped_tokens,
                    values.entropy[is_real].sum(),
                    is_real.sum(),
                    gap[is_current].sum(),
                    is_current.sum(),
                    torch.tensor(float(batch.tokens.shape[1])),
                ]
            ).double()
        # Megatron wants a token count; the loss is a sum already and is divided by nothing.
        return result.loss, torch.ones((), dtype=torch.int), report


def _metrics(sums: dict[str, float], result: StepResult) -> list[Metric]:
    tokens, applied = sums["tokens"], float(not result.was_skipped)
    return [
        Metric("train/loss", sums["loss"]),
        Metric("train/clip_fraction", sums["clipped"], count=tokens),
        Metric("train/entropy_nats", sums["entropy"], count=tokens),
        Metric("train/logprob_gap", sums["gap"], count=sums["gap_tokens"]),
        Metric("train/logprob_gap_tokens", sums["gap_tokens"], "sum"),
        Metric("train/grad_norm", result.grad_norm if applied else 0.0, count=applied),
        Metric("train/skipped_steps", 1.0 - applied, "sum"),
    ]


def _speed(positions: float, seconds: float) -> list[Metric]:
    return [
        Metric("train/positions", positions, "sum"),
        Metric("train/tokens_per_s", positions, count=seconds),
        Metric("train/update_s", seconds, "sum"),
    ]
