"""Mistral 7B, Nemo and Small without a vision tower, Mixtral; and Mistral Small 3.1 on with one.

Mistral3 is the wrapper of Mistral Small 3.1 and 3.2, Magistral from 2507 on, Devstral, and
Ministral 3.
"""

from megatron_rl.weights.layout.families.family import Experts, Family, Spelling, Wrapper

MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    has_window=True,
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    has_window=True,
    experts=Experts("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", normalises=True),
)
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    "ministral3",
    engine_class="Ministral3ForCausalLM",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    scales_queries=True,
)
MISTRAL3 = Family(
    "Mistral3ForConditionalGeneration",
    "mistral",
    engine_class="MistralForCausalLM",
    defaults=MISTRAL.defaults,
    has_window=True,
    wrapper=Wrapper(
        text_types=("mistral",),
        spellings=(
            Spelling("language_model.model.", "language_model.lm_head.weight"),
            Spelling("model.language_model."),
        ),
        carried=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
        others={"ministral3": MINISTRAL3},
    ),
)
