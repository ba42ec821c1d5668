"""Microbatches through the pipeline of a model, and what its last stage makes of them.

Used by trainer ranks: for the policy, and for a teacher of another size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.backend.context import shard_positions
from megatron_rl.backend.profiling import span
from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.kept_reference import kept_weight, with_weight_on
from megatron_rl.trainer.loss_tokens import NOTHING, Known
from megatron_rl.trainer.model.build import packed_params
from megatron_rl.trainer.model.collate import MicroBatch, collate, context_shard
from megatron_rl.trainer.model.filling import check_fits, fill
from megatron_rl.trainer.model.last_stage import without_output_layer
from megatron_rl.trainer.model.logprobs import TokenLogprobs
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.model.router_replay import forget_choices, replayed
from megatron_rl.trainer.token_values import ValuesOfTokens
from megatron_rl.weights.folders.load import unwrap

PassInput = tuple[MicroBatch, Known]
"""Inputs of one pass through the model: a microbatch, and known values of its tokens."""
ForwardStep = Callable[[Iterator[PassInput], torch.nn.Module], tuple[Tensor, Callable]]


@dataclass(frozen=True)
class PassInputs:
    """The microbatches of a minibatch, each made when a pass takes it: none is kept."""

    shares: list[list[TrainSequence]]
    known: list[Known]
    collate: Callable[[list[TrainSequence]], MicroBatch]

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[PassInput]:
        for share, known in zip(self.shares, self.known, strict=True):
            yield self.collate(share), known


class Passes:
    """Passes of one model, under its current weights."""

    def __init__(
        self, policy: Policy, objective: Objective, train: TrainConfig, *, vocab: int = 0
    ) -> None:
        """vocab: token ids that count; 0: all of the model's."""
        self.policy = policy
        self._objective = objective
        shape = policy.shape
        self._choice_width = train.router_replay * shape.layers * shape.experts_per_token
        self._values = ValuesOfTokens(
            policy, objective, train.logprob_chunk_tokens, vocab or shape.vocab
        )
        self._forward_backward = get_forward_backward_func()

    def inputs(self, minibatch: MinibatchShare, known: Sequence[Known] = ()) -> PassInputs:
        """The microbatches as this rank's stage takes them.

        Raises InputError for one that does not fit into expert.train.pad_microbatches.
        """
        # Megatron's interleaved schedule needs a multiple of the stages: placeholders fill it up.
        missing = -len(minibatch.microbatches) % self.policy.microbatch_multiple
        shares = [*minibatch.microbatches, *([] for _ in range(missing))]
        if positions := self.policy.fixed_positions:
            check_fits(max(sum(len(s.token_ids) for s in share) for share in shares), positions)
        known = with_weight_on(self.policy.device, known) or [NOTHING] * len(shares)
        send = self.policy.backend.send

        def collated(share: list[TrainSequence]) -> MicroBatch:
            batch = self._microbatch(share)
            return replace(batch, temperature=minibatch.temperature).moved(send)

        return PassInputs(shares, known, collated)

    def _microbatch(self, sequences: list[TrainSequence]) -> MicroBatch:
        """The sequences packed, as far as this context rank holds them."""
        policy = self.policy
        batch = collate(
            sequences,
            multiple=policy.position_multiple,
            sequence_multiple=policy.sequence_multiple,
            choice_width=self._choice_width,
            experts=policy.shape.experts,
            shares_prompts=policy.shares_prompts,
        )
        if policy.fixed_positions:
            return fill(batch, policy.fixed_positions, vocab=policy.shape.vocab)
        ranks = policy.parallel.context
        if ranks == 1:
            return batch
        rank = parallel_state.get_context_parallel_rank()
        return context_shard(batch, shard_positions(batch.sequence_starts, rank, ranks))

    @span("pass")
    def run(self, inputs: PassInputs, step: ForwardStep, *, is_training: bool) -> list[Any]:
        """Each microbatch through the pipeline; what `step` reports of it, on last stages."""
        # Megatron keeps replayed choices in lists until they are recomputed from, if they ever are.
        forget_choices(self.policy.chunks)
        reports = self._forward_backward(
            forward_step_func=step,
            # Each chunk of the model takes every microbatch once, so each needs its own iterator.
            data_iterator=[iter(inputs) for _ in self.policy.chunks],
            model=self.policy.chunks,
            num_microbatches=len(inputs),
            # Megatron reads it where all microbatches have the same positions.
            seq_length=self.policy.fixed_positions,
            micro_batch_size=1,
            forward_only=not is_training,
            # Makes a last stage return what `step` computes, instead of a loss to go backward from.
            collect_non_loss_data=not is_training,
        )
        self._values.free_memory()
        return reports

    def hidden(self, batch: MicroBatch, model: torch.nn.Module) -> Tensor:
        """The output of this rank's stage; on the last stage hidden states."""
        packed = packed_params(batch.sequence_starts, batch.longest, batch.folding)
        replay = replayed(
            model,
            batch.expert_choices,
            topk=self.policy.shape.experts_per_token,
            share=self.policy.position_share,
        )
        # Megatron's bfloat16 wrapper would hand hidden states on in float32, at twice the bytes.
        options = {"fp32_output": False} if self.policy.cfg.model.dtype == "bfloat16" else {}
        with replay, without_output_layer(unwrap(model)):
            return model(
                batch.tokens, batch.position_ids, None, packed_seq_params=packed, **options
            )

    def values(self, batch: MicroBatch, known: Known, hidden: Tensor) -> TokenLogprobs:
        """Values of all completion tokens of the microbatch. hidden: the last stage's output."""
        return self._values.of(batch, known, hidden)

    @torch.no_grad()
    def all_values(self, inputs: PassInputs) -> list[TokenLogprobs]:
        """Values per microbatch, without gradient; nothing on stages that compute no loss."""
        return self.run(inputs, self._value_step, is_training=False)

    @torch.no_grad()
    def as_reference(self, minibatches: Sequence[MinibatchShare]) -> list[list[Known]]:
        """The objective's inputs from this model as a reference, per microbatch."""
        weight = kept_weight(self.policy) if self._objective.needs_reference_kl else None
        step = partial(self._reference_step, weight)
        return [self.run(self.inputs(m), step, is_training=False) for m in minibatches]

    def _value_step(
        self, inputs: Iterator[PassInput], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., TokenLogprobs]]:
        batch, known = next(inputs)
        return self.hidden(batch, model), lambda hidden, non_loss_data: self.values(
            batch, known, hidden
        )

    def _reference_step(
        self, weight: Tensor | None, inputs: Iterator[PassInput], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Known]]:
        batch, _ = next(inputs)
        return self.hidden(batch, model), lambda hidden, non_loss_data: self._values.of_reference(
            batch, hidden, weight
        )
