"""OLMo 2 and 3: norms behind attention and the MLP, and norms of queries and keys of all heads."""

from dataclasses import replace

from megatron_rl.weights.layout.families.family import Family

OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    has_qk_norm=True,
    norms_all_heads=True,
    norms_behind=True,
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    engine_class="Olmo2ForCausalLM",
    defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096},
    mixes_windows=True,
    stretches_full_layers=True,
)
