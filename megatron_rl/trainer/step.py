"""One optimizer step over packed microbatches.

Runs in trainer ranks; the same for reinforcement learning and supervised fine-tuning.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.backend.context import shard_positions
from megatron_rl.config.tree import OptimizerConfig, TrainConfig
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.guard import StepGuard
from megatron_rl.trainer.loss_metrics import SumsLayout, loss_metrics
from megatron_rl.trainer.loss_tokens import NOTHING, Known, tokens_of, whole, whole_groups
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
from megatron_rl.trainer.reference import open_reference
from megatron_rl.weights.folders.load import unwrap

PassInput = tuple[MicroBatch, Known]
"""What one pass through the model takes: a microbatch, and what is known of its tokens."""
ForwardStep = Callable[[Iterator[PassInput], torch.nn.Module], tuple[Tensor, Callable]]


@dataclass(frozen=True)
class Totals:
    """What a minibatch added up to over all ranks."""

    sums: dict[str, float]
    """loss; entropy in nats; tokens; padded_tokens (positions); the objective's own."""
    mismatch: Tensor  # as mismatch_sums gives it, on the host


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
        train = train or TrainConfig()
        self.policy = policy
        self._objective = objective
        self._optimizer_cfg = optimizer
        self._total_steps = total_steps
        self._steps_done = 0
        shape = policy.shape
        self._choice_width = train.router_replay * shape.layers * shape.experts_per_token
        self._chunk_tokens = train.logprob_chunk_tokens
        self._logit_memory = LogitMemory()
        self._sums = SumsLayout.of(objective)
        self._guard = StepGuard(train, run_dir / "skipped")
        self.reference = open_reference(policy, objective.cfg)
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

    def prepare(self, minibatches: Sequence[MinibatchShare]) -> list[list[Known]]:
        """What the objective needs to know of a batch before its first update.

        Of each minibatch, of each microbatch; one forward pass for the policy's own logprobs, one
        for the reference's, where they are needed. On stages that compute no loss nothing is known.
        """
        own: list[list[Tensor]] = [[] for _ in minibatches]
        if self._objective.needs_proximal:
            own = [self._logprobs(minibatch) for minibatch in minibatches]
        reference: list[list[Tensor]] = [[] for _ in minibatches]
        if self.reference is not None:
            with self.reference.in_place():
                reference = [self._logprobs(minibatch) for minibatch in minibatches]
        return [
            [Known(*values) for values in zip_longest(*parts)]
            for parts in zip(own, reference, strict=True)
        ]

    @torch.no_grad()
    def _logprobs(self, minibatch: MinibatchShare) -> list[Tensor]:
        """Of each microbatch [completion tokens], under the weights that are in place."""
        return self._run(self._inputs(minibatch, []), self._logprob_step, is_training=False)

    def update(
        self,
        minibatch: MinibatchShare,
        *,
        version: int,
        known: Sequence[Known] = (),
    ) -> list[Metric]:
        """One optimizer step; collective over all trainer ranks.

        version: policy version that is being trained from; tokens sampled under it measure the
        mismatch between trainer and generator logprobs, before the update. A step whose gradient
        is not finite, or has exploded, is skipped and counted. Raises TrainingStopped when too
        many are, or when the mismatch is above its limit. known: as `prepare` gave it.
        """
        started = time.monotonic()
        totals = self.accumulate(minibatch, version=version, known=known)
        # Before the step: a mismatch above its limit ends the run with the weights as they were.
        self._guard.check_mismatch(totals.mismatch, version=version)
        cfg = self._optimizer_cfg
        lr = lr_at(self._steps_done, cfg, self._total_steps)
        result = step_if_finite(self._optimizer, lr=lr, skip_norm=cfg.skip_grad_norm)
        # A skipped step keeps its place in the learning-rate schedule.
        self._steps_done += 1
        if self.reference is not None:
            self.reference.follow(self.gather)
        self._guard.count(result, minibatch, version=version)
        seconds = time.monotonic() - started
        return [
            *loss_metrics(totals.sums),
            *_step_metrics(result),
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
        known: Sequence[Known] = (),
    ) -> Totals:
        """Gradient of a minibatch, left in the gradient buffers."""
        inputs = self._inputs(minibatch, known)
        if self._objective.needs_groups:
            inputs = self._with_advantages(inputs, minibatch, version)
        zero_gradients(self.policy.chunks, self._optimizer)
        reports = self._run(inputs, partial(self._loss_step, version), is_training=True)
        size = len(self._sums.names)
        local = torch.zeros(size + MISMATCH_SIZE, dtype=torch.float64, device=self.policy.device)
        # Tensor ranks have equal reports, and context ranks too: one of them adds to the sum over
        # all ranks.
        is_first = not parallel_state.get_context_parallel_rank()
        if reports and is_first and not parallel_state.get_tensor_model_parallel_rank():
            local += torch.stack(reports).sum(0)
        # One reduction for all metrics; only last stages hold reports.
        dist.all_reduce(local)
        sums, mismatch = local.cpu().split([size, MISMATCH_SIZE])
        return Totals(self._sums.named(sums), mismatch)

    @torch.no_grad()
    def _with_advantages(
        self, inputs: list[PassInput], minibatch: MinibatchShare, version: int
    ) -> list[PassInput]:
        """The inputs with advantages that depend on the logprobs of whole groups, by one pass."""
        found = self._run(inputs, self._logprob_step, is_training=False)
        if not found:
            return inputs
        parts = [
            tokens_of(batch, logprobs, known, version=version)
            for (batch, known), logprobs in zip(inputs, found, strict=True)
        ]
        tokens = whole_groups(parts, groups=minibatch.groups, members=minibatch.members)
        advantages = self._objective.advantages(tokens).split([len(p.weights) for p in parts])
        return [
            (batch, replace(known, advantages=mine))
            for (batch, known), mine in zip(inputs, advantages, strict=True)
        ]

    def _inputs(self, minibatch: MinibatchShare, known: Sequence[Known]) -> list[PassInput]:
        # Megatron's interleaved schedule needs a multiple of the stages: placeholders fill it up.
        missing = -len(minibatch.microbatches) % self.policy.microbatch_multiple
        shares = [*minibatch.microbatches, *([] for _ in range(missing))]
        batches = [self._microbatch(share).to(self.policy.device) for share in shares]
        return list(zip(batches, known or [NOTHING] * len(batches), strict=True))

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
        return self._hidden(batch, model), lambda hidden, non_loss_data: whole(
            self._token_logprobs(batch, hidden).logprobs, batch
        )

    def _loss_step(
        self,
        version: int,
        inputs: Iterator[PassInput],
        model: torch.nn.Module,
    ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
        batch, known = next(inputs)
        return self._hidden(batch, model), partial(self._loss, batch, version, known)

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
            differentiates_entropy=self._objective.has_entropy_bonus,
            memory=self._logit_memory,
        )
        return token_logprobs(selected, batch.targets, layer)

    def _loss(
        self, batch: MicroBatch, version: int, known: Known, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = self._token_logprobs(batch, hidden)
        logprobs, entropy = whole(values.logprobs, batch), whole(values.entropy, batch)
        tokens = tokens_of(batch, logprobs, known, version=version)
        advantages = known.advantages
        if advantages is None:
            advantages = self._objective.advantages(tokens)
        result = self._objective.loss(tokens, advantages, entropy)
        # For the mismatch: the trainer's logprobs before the batch's first update, if recomputed.
        own = logprobs.detach() if known.proximal_logprobs is None else known.proximal_logprobs
        is_current = tokens.is_real & (tokens.lags == 0)
        with torch.no_grad():
            report = self._sums.stack(
                result.sums
                | {
                    "loss": result.loss,
                    "entropy": entropy[tokens.is_real].sum(),
                    "tokens": tokens.is_real.sum(),
                    "padded_tokens": result.loss.new_tensor(
                        batch.rows * self.policy.parallel.context
                    ),
                }
            )
            mismatch = mismatch_sums(
                own[is_current],
                batch.generator_logprobs[is_current],
                self._objective.cfg.surrogate,
            )
        # Megatron wants a token count; the loss is a sum already and is divided by nothing.
        return result.loss, torch.ones((), dtype=torch.int), torch.cat([report, mismatch])


def _step_metrics(result: StepResult) -> list[Metric]:
    applied = float(not result.was_skipped)
    return [
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
