"""One optimizer step over packed microbatches.

Runs in trainer ranks; the same for reinforcement learning and supervised fine-tuning. The calls
from a minibatch to its gradient:

    Trainer.update                      optimizer step, metrics, limits
      Trainer.accumulate                gradient of the minibatch
        Passes.forward_backward         Megatron's pipeline schedule; for each microbatch it calls
          Passes.forward                trunk: token ids -> hidden states of this stage
          Trainer._loss                 on the last stage: hidden states -> loss
            Passes.compute_log_probs    head: hidden states -> logprobs, entropy, KL per token
              token_logprobs            some rows at a time, with its own backward pass:
                OutputLayer.logits      product with the output weight, then softmax in place
            Objective.loss              policy loss, KL, entropy bonus (`algorithms/objective.py`)

The logprobs of the policy before an update (`Trainer.logprobs`) and of the reference
(`reference.py`) come from the same `Passes`, by `forward_only`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.algorithms.soft_value import SoftValues, soft_values
from megatron_rl.algorithms.tokens import Tokens
from megatron_rl.backend.profiling import span
from megatron_rl.config.tree import OptimizerConfig, TrainConfig
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.forward_backward import Passes, PassInput, PassInputs
from megatron_rl.trainer.guard import StepGuard
from megatron_rl.trainer.loss_inputs import Prepared, tokens_of, whole_groups
from megatron_rl.trainer.metrics import SumsLayout, Utilisation, loss_metrics
from megatron_rl.trainer.mismatch import SIZE as MISMATCH_SIZE
from megatron_rl.trainer.mismatch import mismatch_metrics, mismatch_sums
from megatron_rl.trainer.model.build import gather_parameters
from megatron_rl.trainer.model.collate import MicroBatch
from megatron_rl.trainer.model.logprobs import TokenLogprobs
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.optimizer import (
    StepResult,
    build_optimizer,
    lr_at,
    step_if_finite,
    zero_gradients,
)
from megatron_rl.trainer.reference import EmaReference, SwappedReference, open_reference
from megatron_rl.trainer.scoring_client import Scorer
from megatron_rl.trainer.step_records import StepProfile, TokenRecord
from megatron_rl.trainer.value_head import ValueHead, first_tokens


@dataclass(frozen=True)
class Totals:
    """Sums of a minibatch over all ranks."""

    sums: dict[str, float]
    """loss; entropy in nats; tokens; padded_tokens (positions); filling (further positions,
    `expert.train.pad_microbatches`); the objective's own."""
    mismatch: Tensor  # as mismatch_sums gives it, on the host
    flops: float  # of the model, forward and backward, without recomputation


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
        record: TokenRecord | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        """total_steps: optimizer steps of the whole phase, for the learning-rate schedule.

        train: None: the defaults, and no limit of the mismatch. record: collects values of each
        token. scorer: of the run, where an engine holds the reference.
        """
        train = train or TrainConfig(max_mismatch=0)
        self.policy = policy
        self._objective = objective
        self._optimizer_cfg = optimizer
        self._total_steps = total_steps
        self.steps_done = 0
        """Calls of `update`: the place in the learning-rate schedule."""
        self._passes = Passes(policy, objective, train)
        self._sums = SumsLayout.of(objective)
        self._guard = StepGuard(train, run_dir / "skipped")
        self.profile = StepProfile(train.profile_steps, run_dir / "profile")
        self._utilisation = Utilisation.of(policy)
        self._record = record
        self.reference = open_reference(policy, objective, train, scorer)
        self.value_head: ValueHead | None = None
        if objective.cfg.learns_value and self.reference is not None and self.reference.hidden:
            lr = objective.cfg.shaping.value_lr
            self.value_head = ValueHead(self.reference.hidden, lr, policy.device)
        # Copies float32 masters: the weights must be loaded by now.
        self.optimizer = build_optimizer(optimizer, policy.chunks)

    def expect_steps(self, count: int) -> None:
        """End the learning-rate schedule after `count` more steps.

        For a restored trainer: the steps before its checkpoint may have had other minibatches.
        """
        self._total_steps = self.steps_done + count

    @span("prepare")
    def prepare(
        self,
        minibatches: Sequence[MinibatchShare],
        *,
        before_swap: Callable[[], None] = lambda: None,
    ) -> list[list[Prepared]]:
        """Logprobs that a batch needs before its first update, per minibatch and microbatch.

        The policy's own logprobs take one forward pass, the reference's another, where the
        objective reads them. Empty values on stages that compute no loss.
        before_swap: called before a reference's weights take the place of the policy's.
        """
        own: list[list[Tensor]] = [[] for _ in minibatches]
        if self._objective.needs_proximal:
            own = [self.logprobs(minibatch) for minibatch in minibatches]
        reference: list[list[Prepared]] = [[] for _ in minibatches]
        if self.reference is not None:
            if isinstance(self.reference, SwappedReference):
                before_swap()
            reference = self.reference.compute_log_probs(self._passes, minibatches)
        return [
            [replace(p or Prepared(), proximal_logprobs=mine) for mine, p in zip_longest(*parts)]
            for parts in zip(own, reference, strict=True)
        ]

    def logprobs(self, minibatch: MinibatchShare) -> list[Tensor]:
        """Logprobs per microbatch [completion tokens], under the current weights."""
        inputs = self._passes.inputs(minibatch)
        return self._passes.forward_only(
            inputs, lambda batch, _, selected: self._passes.compute_log_probs(batch, selected)[0]
        )

    @span("update")
    def update(
        self,
        minibatch: MinibatchShare,
        *,
        version: int,
        prepared: Sequence[Prepared] = (),
        is_first: bool = True,
        before_step: Callable[[], None] = lambda: None,
    ) -> list[Metric]:
        """One optimizer step; collective over all trainer ranks.

        version: policy version that is being trained from. The tokens sampled under it measure the
        mismatch between trainer and generator logprobs, before the update. is_first: the parameters
        are those of the version; later minibatches measure it only by recomputed logprobs.
        prepared: as `prepare` returned it. before_step: called before the parameters change.
        A step whose gradient is not finite, or has exploded, is skipped and counted. Raises
        TrainingStopped when too many are, or when the mismatch is above its limit.
        """
        started = time.monotonic()
        totals = self.accumulate(minibatch, version=version, prepared=prepared, is_first=is_first)
        # Before the step: a mismatch above its limit ends the run with the weights as they were.
        self._guard.check_mismatch(totals.mismatch, version=version)
        before_step()
        passed = time.monotonic()
        cfg = self._optimizer_cfg
        lr = lr_at(self.steps_done, cfg, self._total_steps)
        result = step_if_finite(self.optimizer, lr=lr, skip_norm=cfg.skip_grad_norm)
        # A skipped step keeps its place in the learning-rate schedule.
        self.steps_done += 1
        if not result.was_skipped:
            if isinstance(self.reference, EmaReference):
                self.reference.follow(self.gather)
            if self.value_head is not None:
                self.value_head.step()
        self._guard.count(result, minibatch, version=version)
        ended = time.monotonic()
        return [
            *loss_metrics(totals.sums),
            *_step_metrics(result),
            *mismatch_metrics(totals.mismatch),
            Metric("train/lr", lr),
            *_speed(totals.sums["padded_tokens"], ended - started),
            *self._utilisation.metrics(
                flops=totals.flops,
                tokens=totals.sums["padded_tokens"],
                seconds=ended - started,
            ),
            *self._filling(totals.sums),
            # Time that does not grow with a minibatch's tokens; the simulator fits it.
            Metric("train/optimizer_s", ended - passed, "sum"),
        ]

    def _filling(self, sums: Mapping[str, float]) -> list[Metric]:
        if not self.policy.fixed_positions:
            return []
        computed = sums["padded_tokens"] + sums["filling"]
        return [Metric("train/filling_share", sums["filling"], count=computed)]

    def gather(self) -> None:
        """Complete the parameters of the last update; call before anything else reads them."""
        gather_parameters(self.policy.chunks)

    def write_record(self, step: int) -> None:
        """Write the values of the tokens of the batch of `step`."""
        if self._record is not None:
            self._record.write(step)

    @span("accumulate")
    def accumulate(
        self,
        minibatch: MinibatchShare,
        *,
        version: int,
        prepared: Sequence[Prepared] = (),
        is_first: bool = True,
    ) -> Totals:
        """Gradient of a minibatch, left in the gradient buffers. is_first: see `update`."""
        inputs = self._passes.inputs(minibatch, prepared)
        if self._objective.cfg.has_soft_value:
            inputs = self._with_soft_values(inputs, minibatch)
        if self._objective.needs_groups:
            inputs = self._with_advantages(inputs, minibatch, version)
        zero_gradients(self.policy.chunks, self.optimizer)
        if self.value_head is not None:
            self.value_head.begin(_rewards(minibatch, self.policy.device))
            self.value_head.clear()

        def step(
            taken: Iterator[PassInput], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
            batch, found = next(taken)
            loss = partial(self._loss, batch, version, found, is_first=is_first)
            return self._passes.forward(batch, model), loss

        reports = self._passes.forward_backward(inputs, step, is_training=True)
        if self._record is not None:
            self._record.end_minibatch(minibatch)
        size = len(self._sums.names)
        entries = size + MISMATCH_SIZE
        local = torch.zeros(entries + 1, dtype=torch.float64, device=self.policy.device)
        if reports and _reports():
            local[:entries] += torch.stack(reports).sum(0)
            local[entries] = self._utilisation.flops(minibatch)
        # One reduction for all metrics; only last stages hold reports.
        dist.all_reduce(local)
        sums, mismatch, flops = local.cpu().split([size, MISMATCH_SIZE, 1])
        return Totals(self._sums.named(sums), mismatch, float(flops))

    @torch.no_grad()
    def _with_soft_values(self, inputs: PassInputs, minibatch: MinibatchShare) -> PassInputs:
        """The inputs with soft values, from the prepared logprobs of whole groups."""
        if inputs.prepared[0].reference_logprobs is None:
            return inputs
        parts = [
            tokens_of(batch, prepared.reference_logprobs, prepared, version=0)
            for batch, prepared in inputs
        ]
        tokens = whole_groups(parts, groups=minibatch.groups, members=minibatch.members)
        found = soft_values(tokens, self._objective.cfg.shaping.temperature)
        sizes = [len(part.segments.ends) for part in parts]
        split = zip(*(values.split(sizes) for values in found), strict=True)
        return inputs.with_values(soft=[SoftValues(*mine) for mine in split])

    @torch.no_grad()
    def _with_advantages(
        self, inputs: PassInputs, minibatch: MinibatchShare, version: int
    ) -> PassInputs:
        """The inputs with advantages that depend on the logprobs of whole groups, by one pass."""

        def read(batch: MicroBatch, prepared: Prepared, selected: Tensor) -> Tokens:
            return self._tokens(batch, prepared, self._values(batch, prepared, selected), version)

        parts = self._passes.forward_only(inputs, read)
        if not parts:
            return inputs
        tokens = whole_groups(parts, groups=minibatch.groups, members=minibatch.members)
        found = self._objective.advantages(tokens).split([len(p.weights) for p in parts])
        return inputs.with_values(advantages=found)

    def _values(self, batch: MicroBatch, prepared: Prepared, selected: Tensor) -> TokenLogprobs:
        return self._passes.compute_log_probs(batch, selected, prepared.reference_layer)

    def _tokens(
        self, batch: MicroBatch, prepared: Prepared, values: TokenLogprobs, version: int
    ) -> Tokens:
        of_prompts = None
        if self.value_head is not None and prepared.features is not None:
            of_prompts = self.value_head.values(prepared.features)
        return tokens_of(
            batch,
            values.logprobs,
            prepared,
            version=version,
            reference_kl=values.reference_kl,
            values=of_prompts,
        )

    def _loss(
        self,
        batch: MicroBatch,
        version: int,
        prepared: Prepared,
        hidden: Tensor,
        *,
        is_first: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = self._values(batch, prepared, self._passes.select(batch, hidden))
        logprobs, entropy = values.logprobs, values.entropy
        tokens = self._tokens(batch, prepared, values, version)
        advantages = prepared.advantages
        if advantages is None:
            advantages = self._objective.advantages(tokens)
        result = self._objective.loss(tokens, advantages, entropy)
        if self.value_head is not None and prepared.features is not None and _reports():
            residuals = advantages[first_tokens(batch.target_ends)]
            self.value_head.add(prepared.features, residuals, is_counted=batch.group_of >= 0)
        # For the mismatch: the trainer's logprobs before the batch's first update, if recomputed.
        own = (
            logprobs.detach() if prepared.proximal_logprobs is None else prepared.proximal_logprobs
        )
        if self._record is not None and _reports():
            self._record.keep(own, entropy, advantages)
        is_of_version = is_first or prepared.proximal_logprobs is not None
        is_current = tokens.is_real & (tokens.lags == 0) & is_of_version
        with torch.no_grad():
            report = self._sums.stack(
                result.sums
                | {
                    "loss": result.loss,
                    "entropy": entropy.masked_fill(~tokens.is_real, 0).sum(),
                    "tokens": tokens.is_real.sum(),
                    "padded_tokens": _constant(
                        batch.rows * self.policy.parallel.context, result.loss
                    ),
                    "filling": _constant(batch.filling, result.loss),
                }
            )
            mismatch = mismatch_sums(
                own, batch.generator_logprobs, self._objective.cfg.policy_loss, is_current
            )
        # Megatron wants a token count; the loss is a sum already and is divided by nothing.
        return result.loss, torch.ones((), dtype=torch.int), torch.cat([report, mismatch])


def _constant(value: float, like: Tensor) -> Tensor:
    """[] float64 on the device of `like`; a copy to the device would wait for it."""
    return like.new_full((), value, dtype=torch.float64)


def _rewards(minibatch: MinibatchShare, device: torch.device) -> Tensor:
    """[sequences] float32 of this rank's share."""
    rewards = [s.reward for microbatch in minibatch.microbatches for s in microbatch]
    return torch.tensor(rewards, dtype=torch.float32, device=device)


def _reports() -> bool:
    """Whether sums over all ranks count this rank: the first of ranks with the same tokens."""
    is_first = not parallel_state.get_context_parallel_rank()
    return is_first and not parallel_state.get_tensor_model_parallel_rank()


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
