"""Qwen2, Qwen2.5 and Qwen3, with experts, and with a vision tower.

Of a prompt without images, the rotary embedding of the wrapped models (mrope) is the plain one: its
three positions are equal.
"""

from megatron_rl.weights.layout.families.family import Experts, Family, Spelling, Wrapper

QWEN2 = Family("Qwen2ForCausalLM", "qwen2", defaults={"num_key_value_heads": 32}, has_qkv_bias=True)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    has_qk_norm=True,
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    defaults={"num_key_value_heads": 4, "norm_topk_prob": False},
    has_qk_norm=True,
    experts=Experts(),
)
_WRAPPED = Spelling("model.language_model.")
QWEN2_5_VL = Family(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2",
    engine_class="Qwen2ForCausalLM",
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    has_qkv_bias=True,
    wrapper=Wrapper(
        text_types=("qwen2_5_vl_text", "qwen2_5_vl"),
        spellings=(_WRAPPED, Spelling("model.")),
        carried=("visual.", "model.visual."),
    ),
)
QWEN3_VL = Family(
    "Qwen3VLForConditionalGeneration",
    "qwen3",
    engine_class="Qwen3ForCausalLM",
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
    has_qk_norm=True,
    wrapper=Wrapper(
        text_types=("qwen3_vl_text",),
        spellings=(_WRAPPED,),
        carried=("model.visual.",),
    ),
)
QWEN3_VL_MOE = Family(
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_moe",
    engine_class="Qwen3MoeForCausalLM",
    defaults={"num_key_value_heads": 16, "rope_theta": 5e5},
    has_qk_norm=True,
    experts=Experts(normalises=True, fused="halves"),
    wrapper=Wrapper(
        text_types=("qwen3_vl_moe_text",),
        spellings=(_WRAPPED,),
        carried=("model.visual.",),
    ),
)
