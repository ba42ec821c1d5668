"""One optimizer step over packed microbatches.

Runs in trainer ranks; the same for reinforcement learning and supervised fine-tuning.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.algorithms.loss import LossFunction, LossInputs
from megatron_rl.backend.context import shard_positions
from megatron_rl.config.tree import LossConfig, OptimizerConfig, TrainConfig
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.guard import StepGuard
from megatron_rl.trainer.mismatch import SIZE as MISMATCH_SIZE
from megatron_rl.trainer.mismatch import mismatch_metrics, mismatch_sums
from megatron_rl.trainer.model.build import gather_parameters, packed_params
from megatron_rl.trainer.model.collate import MicroBatch, collate, context_shard
from megatron_rl.trainer.model.last_stage import (
    output_weight,
    select_positions,
    without_output_layer,
)
from megatron_rl.trainer.model.logprobs import (
    LogitMemory,
    OutputLayer,
    TokenLogprobs,
    token_logprobs,
)
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.model.router_replay import forget_choices, replayed
from megatron_rl.trainer.optimizer import (
    StepResult,
    build_optimizer,
    lr_at,
    step_if_finite,
    zero_gradients,
)
from megatron_rl.weights.folders.load import unwrap

PassInput = tuple[MicroBatch, Tensor | None]
"""What one pass through the model takes: a microbatch, and what its importance ratios divide by;
None: the generators' logprobs."""
ForwardStep = Callable[[Iterator[PassInput], torch.nn.Module], tuple[Tensor, Callable]]
_SUMS = ("loss", "clipped", "entropy", "tokens", "padded_tokens")


@dataclass(frozen=True)
class Totals:
    """What a minibatch added up to over all ranks."""

    sums: dict[str, float]  # loss; tokens clipped; entropy in nats; tokens; positions
    mismatch: Tensor  # as mismatch_sums gives it, on the host


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
        self,
        policy: Policy,
        objective: Objective,
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        train: TrainConfig | None = None,
        run_dir: Path = Path(),
    ) -> None:
        """total_steps: optimizer steps of the whole phase, for the learning-rate schedule."""
        self.policy = policy
        self._objective = objective
        self._optimizer_cfg = optimizer
        self._total_steps = total_steps
        self._steps_done = 0
        shape = policy.shape
        self._choice_width = objective.replays_experts * shape.layers * shape.experts_per_token
        train = train or TrainConfig()
        self._chunk_tokens = train.logprob_chunk_tokens
        self._logit_memory = LogitMemory()
        self._guard = StepGuard(train, run_dir / "skipped")
        # Copies float32 masters: the weights must be loaded by now.
        self._optimizer = build_optimizer(optimizer, policy.chunks)
        self._forward_backward = get_forward_backward_func()

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Whose state a checkpoint holds."""
        return self._optimizer

    @property
    def steps_done(self) -> int:
        """Calls of `update`: the place in the learning-rate schedule."""
        return self._steps_done

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._steps_done = steps

    def old_logprobs(self, minibatches: Sequence[MinibatchShare]) -> list[list[Tensor] | None]:
        """What the importance ratios of a batch divide by; before its first update.

        Of each minibatch [microbatches][completion tokens], by one forward pass on all ranks;
        None: what the generators gave, also on stages that compute no loss.
        """
        if self._objective.cfg.old_logprobs == "generator":
            return [None] * len(minibatches)
        with torch.no_grad():
            return [
                self._run(self._inputs(minibatch, None), self._logprob_step, is_training=False)
                or None
                for minibatch in minibatches
            ]

    def update(
        self,
        minibatch: MinibatchShare,
        *,
        version: int,
        old_logprobs: Sequence[Tensor] | None = None,
    ) -> list[Metric]:
        """One optimizer step; collective over all trainer ranks.

        version: policy version that is being trained from; tokens sampled under it measure the
        mismatch between trainer and generator logprobs, before the update. A step whose gradient
        is not finite, or has exploded, is skipped and counted. Raises TrainingStopped when too
        many are, or when the mismatch is above its limit.
        """
        started = time.monotonic()
        totals = self.accumulate(minibatch, version=version, old_logprobs=old_logprobs)
        # Before the step: a mismatch above its limit ends the run with the weights as they were.
        self._guard.check_mismatch(totals.mismatch, version=version)
        cfg = self._optimizer_cfg
        lr = lr_at(self._steps_done, cfg, self._total_steps)
        result = step_if_finite(self._optimizer, lr=lr, skip_norm=cfg.skip_grad_norm)
        # A skipped step keeps its place in the learning-rate schedule.
        self._steps_done += 1
        self._guard.count(result, minibatch, version=version)
        seconds = time.monotonic() - started
        return [
            *_metrics(totals.sums, result),
            *mismatch_metrics(totals.mismatch),
            Metric("train/lr", lr),
            *_speed(totals.sums["padded_tokens"], seconds),
        ]

    def gather(self) -> None:
        """Complete the parameters of the last update; before anything but an update reads them."""
        gather_parameters(self.policy.chunks)

    def accumulate(
        self,
        minibatch: MinibatchShare,
        *,
        version: int,
        old_logprobs: Sequence[Tensor] | None = None,
    ) -> Totals:
        """Gradient of a minibatch, left in the gradient buffers."""
        inputs = self._inputs(minibatch, old_logprobs)
        zero_gradients(self.policy.chunks, self._optimizer)
        reports = self._run(inputs, partial(self._loss_step, version), is_training=True)
        local = torch.zeros(
            len(_SUMS) + MISMATCH_SIZE, dtype=torch.float64, device=self.policy.device
        )
        # Tensor ranks have equal reports: one of them adds to the sum over all ranks.
        if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
            local += torch.stack(reports).sum(0)
        # One reduction for all metrics; only last stages hold reports.
        dist.all_reduce(local)
        sums, mismatch = local.cpu().split([len(_SUMS), MISMATCH_SIZE])
        return Totals(dict(zip(_SUMS, sums.tolist(), strict=True)), mismatch)

    def _inputs(self, minibatch: MinibatchShare, old: Sequence[Tensor] | None) -> list[PassInput]:
        # Megatron's interleaved schedule needs a multiple of the stages: placeholders fill it up.
        missing = -len(minibatch.microbatches) % self.policy.microbatch_multiple
        shares = [*minibatch.microbatches, *([] for _ in range(missing))]
        batches = [self._microbatch(share).to(self.policy.device) for share in shares]
        return list(zip(batches, old or [None] * len(batches), strict=True))

    def _microbatch(self, sequences: list[TrainSequence]) -> MicroBatch:
        """The sequences packed, as far as this context rank holds them."""
        policy = self.policy
        batch = collate(
            sequences,
            multiple=policy.position_multiple,
            sequence_multiple=policy.sequence_multiple,
            choice_width=self._choice_width,
            shares_prompts=policy.shares_prompts,
        )
        ranks = policy.parallel.context
        if ranks == 1:
            return batch
        rank = parallel_state.get_context_parallel_rank()
        return context_shard(batch, shard_positions(batch.sequence_starts, rank, ranks))

    def _run(
        self, inputs: list[PassInput], step: ForwardStep, *, is_training: bool
    ) -> list[Tensor]:
        """Each microbatch through the pipeline; what `step` reports of it, on last stages."""
        # Megatron keeps replayed choices in lists until they are recomputed from, if they ever are.
        forget_choices(self.policy.chunks)
        reports = self._forward_backward(
            forward_step_func=step,
            # Each chunk of the model takes every microbatch once, so each needs its own iterator.
            data_iterator=[iter(inputs) for _ in self.policy.chunks],
            model=self.policy.chunks,
            num_microbatches=len(inputs),
            seq_length=max(int(batch.sequence_starts[-1]) for batch, _ in inputs),
            micro_batch_size=1,
            forward_only=not is_training,
            # Makes a last stage return what `step` computes, instead of a loss to go backward from.
            collect_non_loss_data=not is_training,
        )
        self._logit_memory.free()
        return reports

    def _logprob_step(
        self, inputs: Iterator[PassInput], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Tensor]]:
        batch, _ = next(inputs)
        return self._hidden(
            batch, model
        ), lambda hidden, non_loss_data: self._token_logprobs(batch, hidden).logprobs

    def _loss_step(
        self,
        version: int,
        inputs: Iterator[PassInput],
        model: torch.nn.Module,
    ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
        batch, old = next(inputs)
        return self._hidden(batch, model), partial(self._loss, batch, version, old)

    def _hidden(self, batch: MicroBatch, model: torch.nn.Module) -> Tensor:
        packed = packed_params(batch.sequence_starts, batch.longest, batch.folding)
        replay = replayed(
            model,
            batch.expert_choices,
            topk=self.policy.shape.experts_per_token,
            share=self.policy.position_share,
        )
        with replay, without_output_layer(unwrap(model)):
            return model(batch.tokens, batch.position_ids, None, packed_seq_params=packed)

    def _token_logprobs(self, batch: MicroBatch, hidden: Tensor) -> TokenLogprobs:
        """Of the microbatch's targets, from the last stage's output."""
        selected = select_positions(
            hidden[0],
            batch.loss_positions,
            is_sequence_parallel=self.policy.has_sequence_parallelism,
        )
        model = unwrap(self.policy.chunks[-1])
        weight = output_weight(model)
        adds_itself = model.config.gradient_accumulation_fusion
        is_embedding = model.pre_process and model.share_embeddings_and_output_weights
        layer = OutputLayer(
            weight,
            vocab_size=self.policy.shape.vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=self._objective.temperature,
            chunk_tokens=self._chunk_tokens,
            gradient=weight.main_grad if adds_itself else None,
            is_sole_user=not is_embedding,
            memory=self._logit_memory,
        )
        return token_logprobs(selected, batch.targets, layer)

    def _loss(
        self, batch: MicroBatch, version: int, old: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = self._token_logprobs(batch, hidden)
        # For the mismatch: the trainer's logprobs before the batch's first update, if recomputed.
        own = values.logprobs.detach() if old is None else old
        inputs = LossInputs(
            values.logprobs,
            batch.generator_logprobs if old is None else old,
            batch.advantages,
            batch.weights,
        )
        cfg = self._objective.cfg
        result = self._objective.function(inputs, cfg)
        # Padding and placeholders have weight 0, and no real token has.
        is_real = batch.weights > 0
        is_current = is_real & (batch.versions == version)
        with torch.no_grad():
            report = torch.stack(
                [
                    result.loss,
                    result.clipped_tokens,
                    values.entropy[is_real].sum(),
                    is_real.sum(),
                    result.loss.new_tensor(batch.rows),
                ]
            ).double()
            mismatch = mismatch_sums(own[is_current], batch.generator_logprobs[is_current], cfg)
        # Megatron wants a token count; the loss is a sum already and is divided by nothing.
        return result.loss, torch.ones((), dtype=torch.int), torch.cat([report, mismatch])


def _metrics(sums: dict[str, float], result: StepResult) -> list[Metric]:
    tokens, applied = sums["tokens"], float(not result.was_skipped)
    return [
        Metric("train/loss", sums["loss"]),
        Metric("train/clip_fraction", sums["clipped"], count=tokens),
        Metric("train/entropy_nats", sums["entropy"], count=tokens),
        Metric("train/grad_norm", result.grad_norm if applied else 0.0, count=applied),
        Metric("train/skipped_steps", 1.0 - applied, "sum"),
        Metric("train/exploded_steps", float(result.has_exploded), "sum"),
    ]


def _speed(positions: float, seconds: float) -> list[Metric]:
    return [
        Metric("train/padded_tokens", positions, "sum"),
        Metric("train/tokens_per_s", positions, count=seconds),
        Metric("train/update_s", seconds, "sum"),
    ]
