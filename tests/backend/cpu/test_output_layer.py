"""Which logits stay in the dtype of their product."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backend.cpu.site_modules import import_shim


@pytest.fixture(scope="module")
def output_layer() -> ModuleType:
    return import_shim("output_layer")


def make_batch(*, is_decode: bool = True, **changes: Any) -> SimpleNamespace:
    info = {
        "is_all_greedy": False, "need_top_p_sampling": False, "need_top_k_sampling": False,
        "need_min_p_sampling": False, "sampling_seed": None, "sampling_mask_batch_indices": None,
        "has_custom_logit_processor": False, "has_watermark_candidates": False,
        "logit_bias": None, "grammars": [None], "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "penalizer_orchestrator": SimpleNamespace(is_required=False),
    }  # fmt: skip
    return SimpleNamespace(
        sampling_info=SimpleNamespace(**info | changes),
        forward_mode=SimpleNamespace(is_decode=lambda: is_decode),
    )


CHANGES = [
    {"is_decode": False},
    {"need_top_p_sampling": True},
    {"logit_bias": torch.zeros(1, 8)},
    {"grammars": [None, object()]},
    {"penalizer_orchestrator": SimpleNamespace(is_required=True)},
    {"acc_additive_penalties": torch.zeros(1, 8)},
    {"has_custom_logit_processor": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_logits_that_others_read_or_change_are_not_drawn_from(
    output_layer: ModuleType, change: dict[str, Any]
) -> None:
    assert output_layer.is_drawn(make_batch())
    assert not output_layer.is_drawn(make_batch(**change))
    # Of prompts that are scored, SGLang gives the processor no sampling.
    assert not output_layer.is_drawn(SimpleNamespace())


class Processor:
    """The calls of SGLang's LogitsProcessor that matter here."""

    final_logit_softcapping = None
    vocab_size = 6

    def forward(self, ids: Any, hidden: torch.Tensor, head: Any, batch: Any) -> torch.Tensor:
        return self._copy_logits_to_buffer(hidden, batch)

    def _copy_logits_to_buffer(
        self, logits: torch.Tensor, batch: Any, use_buffer: bool = True, softcap: Any = None
    ) -> torch.Tensor:
        return logits[:, : self.vocab_size].float()

    def _compute_lm_head(self) -> None: ...


def test_logits_keep_their_dtype_only_where_a_token_is_drawn(output_layer: ModuleType) -> None:
    module = ModuleType("logits_processor")
    module.LogitsProcessor = type("LogitsProcessor", (Processor,), dict(vars(Processor)))
    output_layer.install(module)
    processor = module.LogitsProcessor()
    logits = torch.randn(2, 8).bfloat16()
    kept = processor.forward(None, logits, None, make_batch())
    assert kept.dtype is torch.bfloat16 and torch.equal(kept, logits[:, :6])
    for batch in (make_batch(need_top_p_sampling=True), make_batch(is_decode=False)):
        copied = processor.forward(None, logits, None, batch)
        assert copied.dtype is torch.float32 and torch.equal(copied, logits[:, :6].float())
