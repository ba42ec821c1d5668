"""Phi-3 and Phi-4: Llama, whose files have fused projections."""

from megatron_rl.weights.layout.families.family import Family

PHI3 = Family(
    "Phi3ForCausalLM",
    "llama",
    engine_class="Phi3ForCausalLM",
    defaults={
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    rope_types=("default", "longrope"),
    rotates_part=True,
    has_window=True,
    has_fused_files=True,
)
