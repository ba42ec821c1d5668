"""Forward and backward passes of one model; `step.py` shows the whole chain of calls.

Used by trainer ranks: for the policy, and for a teacher of another size. The model ends with hidden
states: logits of all positions are never computed. `compute_log_probs` applies the output layer to
the positions that predict a completion token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.backend.context import shard_positions
from megatron_rl.backend.profiling import span
from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.loss_inputs import Prepared, gather_context
from megatron_rl.trainer.model.build import DTYPES, packed_params
from megatron_rl.trainer.model.collate import MicroBatch, check_fits, collate, context_shard, fill
from megatron_rl.trainer.model.logprobs import (
    LogitMemory,
    OutputLayer,
    ReferenceLayer,
    TokenLogprobs,
    token_logprobs,
)
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.model.router_replay import forget_choices, replayed
from megatron_rl.weights.folders.load import unwrap

T = TypeVar("T")
PassInput = tuple[MicroBatch, Prepared]
ForwardStep = Callable[[Iterator[PassInput], torch.nn.Module], tuple[Tensor, Callable]]


@dataclass(frozen=True)
class PassInputs:
    """The microbatches of a minibatch. Each is collated when a pass takes it; none is kept."""

    shares: list[list[TrainSequence]]
    prepared: list[Prepared]
    collate: Callable[[list[TrainSequence]], MicroBatch]

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[PassInput]:
        for share, prepared in zip(self.shares, self.prepared, strict=True):
            yield self.collate(share), prepared

    def with_values(self, **values: Sequence[Any]) -> Self:
        """The same with fields of `Prepared` set: each a value per microbatch."""
        each = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        prepared = [replace(p, **new) for p, new in zip(self.prepared, each, strict=True)]
        return replace(self, prepared=prepared)


class Passes:
    """Passes of one model under its current weights."""

    def __init__(
        self, policy: Policy, objective: Objective, train: TrainConfig, *, vocab: int = 0
    ) -> None:
        """vocab: token ids that count; 0: all of the model's."""
        self.policy = policy
        self.objective = objective
        shape = policy.shape
        self._choice_width = train.router_replay * shape.layers * shape.experts_per_token
        self._chunk_tokens = train.logprob_chunk_tokens
        self._vocab = vocab or shape.vocab
        self._memory = LogitMemory()
        self._schedule = get_forward_backward_func()

    def inputs(self, minibatch: MinibatchShare, prepared: Sequence[Prepared] = ()) -> PassInputs:
        """The microbatches as this rank's stage takes them.

        Raises InputError for one that does not fit into expert.train.pad_microbatches.
        """
        shares = self.padded_microbatches(minibatch)
        if positions := self.policy.fixed_positions:
            check_fits(max(sum(len(s.token_ids) for s in share) for share in shares), positions)
        send = self.policy.backend.send

        def collated(share: list[TrainSequence]) -> MicroBatch:
            batch = self._microbatch(share)
            return replace(batch, temperature=minibatch.temperature).moved(send)

        found = _with_reference_weight_on(self.policy.device, prepared)
        return PassInputs(shares, found or [Prepared()] * len(shares), collated)

    def padded_microbatches(self, minibatch: MinibatchShare) -> list[list[TrainSequence]]:
        """The microbatches, and empty ones: Megatron's interleaved schedule needs a multiple of
        the stages."""
        missing = -len(minibatch.microbatches) % self.policy.microbatch_multiple
        return [*minibatch.microbatches, *([] for _ in range(missing))]

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
    def forward_backward(
        self, inputs: PassInputs, step: ForwardStep, *, is_training: bool
    ) -> list[Any]:
        """Run each microbatch through the pipeline; returns what `step` reports, on last stages."""
        # Megatron keeps replayed choices in lists until they are recomputed from, if they ever are.
        forget_choices(self.policy.chunks)
        reports = self._schedule(
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
        self._memory.free()
        return reports

    @torch.no_grad()
    def forward_only(
        self, inputs: PassInputs, read: Callable[[MicroBatch, Prepared, Tensor], T]
    ) -> list[T]:
        """What `read` makes of each microbatch and its selected hidden states, without gradient.

        Empty on stages that compute no loss.
        """

        def step(
            taken: Iterator[PassInput], model: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., T]]:
            batch, prepared = next(taken)
            return self.forward(batch, model), lambda hidden, non_loss_data: read(
                batch, prepared, self.select(batch, hidden)
            )

        return self.forward_backward(inputs, step, is_training=False)

    def forward(self, batch: MicroBatch, model: torch.nn.Module) -> Tensor:
        """The output of this rank's stage; on the last stage hidden states."""
        packed = packed_params(batch.sequence_starts, batch.lengths, batch.folding)
        replay = replayed(
            model,
            batch.expert_choices,
            topk=self.policy.shape.experts_per_token,
            share=self.policy.position_share,
            pin=self.policy.backend.pin,
        )
        # Megatron's bfloat16 wrapper would return hidden states in float32, at twice the bytes.
        options = {"fp32_output": False} if self.policy.cfg.model.dtype == "bfloat16" else {}
        with replay, without_output_layer(unwrap(model)):
            return model(
                batch.tokens, batch.position_ids, None, packed_seq_params=packed, **options
            )

    def select(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """[targets of this context rank, hidden]: the states that predict a completion token.

        On every tensor rank; parts of the gradient are summed on the way back. hidden: [1,
        positions, hidden], or this tensor rank's slice of them under sequence parallelism.
        """
        states, positions = hidden[0], batch.loss_positions
        if self.policy.has_sequence_parallelism:
            return tensor_parallel.gather_from_sequence_parallel_region(states)[positions]
        group = parallel_state.get_tensor_model_parallel_group()
        return tensor_parallel.copy_to_tensor_model_parallel_region(states[positions], group=group)

    def compute_log_probs(
        self, batch: MicroBatch, selected: Tensor, reference: ReferenceLayer | None = None
    ) -> TokenLogprobs:
        """Logprobs and entropy of all completion tokens of the microbatch; with a reference, KL.

        selected: as `select` returns it.
        """
        model = unwrap(self.policy.chunks[-1])
        weight = output_weight(model)
        # Data parallelism gives a trained weight a float32 buffer for its gradient.
        gradient = (
            weight.main_grad if weight.requires_grad and hasattr(weight, "main_grad") else None
        )
        is_embedding = model.pre_process and model.share_embeddings_and_output_weights
        layer = OutputLayer(
            weight,
            vocab_size=self._vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=batch.temperature,
            chunk_tokens=self._chunk_tokens,
            gradient=gradient,
            is_sole_user=not is_embedding,
            differentiates_entropy=self.objective.has_entropy_bonus,
            reference=None if reference is None else reference.to(selected.device),
            logits_dtype=DTYPES[self.policy.cfg.model.logits_dtype],
            memory=self._memory,
        )
        values = token_logprobs(selected, batch.targets, layer)
        return TokenLogprobs(*(None if v is None else gather_context(v, batch) for v in values))


def _with_reference_weight_on(device: torch.device, prepared: Sequence[Prepared]) -> list[Prepared]:
    """The same with the output weight that all microbatches share on the device, moved once."""
    layer = prepared[0].reference_layer if prepared else None
    if layer is None:
        return list(prepared)
    weight = layer.weight.to(device, non_blocking=True)
    return [
        replace(p, reference_layer=p.reference_layer and replace(p.reference_layer, weight=weight))
        for p in prepared
    ]


@contextmanager
def without_output_layer(model: GPTModel) -> Iterator[None]:
    """Within the block a last stage returns hidden states: [1, positions of this rank, hidden].

    The layer is still called, as Megatron waits in its hooks for parameters under way.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None:
        yield
        return
    layer.forward = lambda hidden, weight=None, runtime_gather_output=None: (hidden, None)
    try:
        yield
    finally:
        del layer.forward


def output_weight(model: GPTModel) -> Tensor:
    """[padded vocabulary / tensor ranks, hidden]: the embedding's parameter where it is tied."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
