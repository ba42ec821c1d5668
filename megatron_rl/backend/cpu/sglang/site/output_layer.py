"""The output layer of SGLang on the CPU: a product with reordered weights, and no copy of logits.

Imported by SGLang's scheduler processes. SGLang 0.5.23 casts the logits of each step to float32;
the loop that draws tokens (`inverse_sampling.py`) reads them as they are.
"""

from types import ModuleType
from typing import Any

import torch
from inverse_sampling import is_shaped_by_temperature
from packed_linear import FEWEST_ROWS_FLOAT32, is_worthwhile, multiply, padded
from seeded_draws import are_wanted

from megatron_rl.backend.cpu.kernels import engine_loops


def install(module: ModuleType) -> None:
    """Change `LogitsProcessor` of `sglang.srt.layers.logits_processor`."""
    if torch.backends.mkldnn.is_available() or are_wanted():
        _install_product(module.LogitsProcessor)
    if engine_loops.are_available():
        _install_dtype(module.LogitsProcessor)


def _install_product(processor: type) -> None:
    compute = processor._compute_lm_head

    def compute_head(
        self: Any,
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        embedding_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        is_plain = (
            type(getattr(lm_head, "quant_method", None)).__name__ == "UnquantizedEmbeddingMethod"
            and not hasattr(lm_head, "set_lora")
            and not self.use_fp32_lm_head
            and self.rl_on_policy_target is None
            and options.get("out") is None
        )
        is_wanted = are_wanted() and lm_head.weight.dtype == hidden_states.dtype
        if is_plain and (is_wanted or is_worthwhile(lm_head.weight, hidden_states)):
            return multiply(lm_head, hidden_states)
        count = hidden_states.shape[0]
        if are_wanted() and 0 < count < FEWEST_ROWS_FLOAT32 and options.get("out") is None:
            many = padded(hidden_states)
            return compute(self, many, lm_head, embedding_bias, **options)[:count]
        return compute(self, hidden_states, lm_head, embedding_bias, **options)

    processor._compute_lm_head = compute_head


def _install_dtype(processor: type) -> None:
    forward, copy = processor.forward, processor._copy_logits_to_buffer

    def note_and_forward(
        self: Any,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        logits_metadata: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        self._keeps_dtype = not self.final_logit_softcapping and is_drawn(logits_metadata)
        return forward(self, input_ids, hidden_states, lm_head, logits_metadata, *rest, **options)

    def copy_or_keep(
        self: Any,
        logits: torch.Tensor,
        logits_metadata: Any,
        use_buffer: bool = True,
        softcap: float | None = None,
    ) -> torch.Tensor:
        is_next = use_buffer and softcap is None
        if is_next and self._keeps_dtype and logits.dtype in engine_loops.DTYPES:
            return logits[:, : self.vocab_size]
        return copy(self, logits, logits_metadata, use_buffer, softcap)

    processor.forward = note_and_forward
    processor._copy_logits_to_buffer = copy_or_keep


def is_drawn(forward_batch: Any) -> bool:
    """Whether nothing but the loop that draws tokens will read the logits of a pass."""
    info = getattr(forward_batch, "sampling_info", None)
    return (
        info is not None
        and forward_batch.forward_mode.is_decode()
        and is_shaped_by_temperature(info)
        and not info.has_custom_logit_processor
        and not info.has_watermark_candidates
        and info.logit_bias is None
        and not any(info.grammars or ())
        and info.acc_additive_penalties is None
        and info.acc_scaling_penalties is None
        and not getattr(info.penalizer_orchestrator, "is_required", False)
    )
