"""SmolLM3: Llama, in which some layers have no rotary embeddings (NoPE, arXiv 2501.18795)."""

from megatron_rl.weights.layout.families.family import Family

SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "llama",
    engine_class="LlamaForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    mixes_windows=True,
    rotates_some=True,
)
