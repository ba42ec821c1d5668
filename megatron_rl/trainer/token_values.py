"""From the last stage's output to what a loss reads of each token.

Used by trainer ranks of the last pipeline stage.
"""

from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.trainer.kept_reference import kept_layer
from megatron_rl.trainer.loss_tokens import NOTHING, Known, whole, whole_values
from megatron_rl.trainer.model.build import DTYPES
from megatron_rl.trainer.model.collate import MicroBatch
from megatron_rl.trainer.model.last_stage import output_weight, select_positions
from megatron_rl.trainer.model.logprobs import (
    LogitMemory,
    OutputLayer,
    TokenLogprobs,
    token_logprobs,
)
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.value_head import prompt_features
from megatron_rl.weights.folders.load import unwrap


class ValuesOfTokens:
    """Logprobs and what else the objective reads, under the weights that are in place."""

    def __init__(self, policy: Policy, objective: Objective, chunk_tokens: int, vocab: int) -> None:
        """chunk_tokens: expert.train.logprob_chunk_tokens. vocab: token ids that count."""
        self._policy = policy
        self._objective = objective
        self._chunk_tokens = chunk_tokens
        self._vocab = vocab
        self._learns_value = objective.cfg.learns_value
        self._memory = LogitMemory()

    def of(self, batch: MicroBatch, known: Known, hidden: Tensor) -> TokenLogprobs:
        """Values of all completion tokens of the microbatch. hidden: the last stage's output."""
        values = self._logprobs(batch, known, self._selected(batch, hidden))
        return whole_values(values, batch)

    def of_reference(self, batch: MicroBatch, hidden: Tensor, weight: Tensor | None) -> Known:
        """With the reference's weights in place. weight: as `kept_weight` gave it, to be kept."""
        selected = self._selected(batch, hidden)
        logprobs = self._logprobs(batch, NOTHING, selected).logprobs
        return Known(
            reference_logprobs=whole(logprobs, batch),
            reference_layer=None if weight is None else kept_layer(selected, weight),
            features=prompt_features(selected, batch) if self._learns_value else None,
        )

    def free_memory(self) -> None:
        """Give the memory of logits back, between passes."""
        self._memory.free()

    def _selected(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """[targets, hidden] of this context rank."""
        return select_positions(
            hidden[0],
            batch.loss_positions,
            is_sequence_parallel=self._policy.has_sequence_parallelism,
        )

    def _logprobs(self, batch: MicroBatch, known: Known, selected: Tensor) -> TokenLogprobs:
        """Values of this context rank's targets."""
        model = unwrap(self._policy.chunks[-1])
        weight = output_weight(model)
        # Data parallelism gives a trained weight a float32 buffer for its gradient.
        gradient = (
            weight.main_grad if weight.requires_grad and hasattr(weight, "main_grad") else None
        )
        is_embedding = model.pre_process and model.share_embeddings_and_output_weights
        reference = known.reference_layer
        layer = OutputLayer(
            weight,
            vocab_size=self._vocab,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=batch.temperature,
            chunk_tokens=self._chunk_tokens,
            gradient=gradient,
            is_sole_user=not is_embedding,
            differentiates_entropy=self._objective.has_entropy_bonus,
            reference=None if reference is None else reference.to(selected.device),
            logits_dtype=DTYPES[self._policy.cfg.model.logits_dtype],
            memory=self._memory,
        )
        return token_logprobs(selected, batch.targets, layer)
