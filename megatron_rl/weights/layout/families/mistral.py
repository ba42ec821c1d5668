"""Mistral 7B, Nemo and Small without a vision tower, Mixtral; and Mistral Small 3.1 on with one.

Mistral3 is the wrapper of Mistral Small 3.1 and 3.2, Magistral from 2507 on, and Devstral.
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
MISTRAL3 = Family(
    "Mistral3ForConditionalGeneration",
    "mistral",
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
        engine_class="MistralForCausalLM",
    ),
)
