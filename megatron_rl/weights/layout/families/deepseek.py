"""DeepSeek-V3 and R1, Moonlight, and the text of Kimi-K2: latent attention and their router."""

from megatron_rl.weights.layout.families.family import Experts, Family

ROUTED = Experts(
    count_keys=("n_routed_experts", "num_local_experts"),
    shared="shared_experts",
    is_corrected=True,
)
"""DeepSeek's router, which others have taken over."""
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v2",
    defaults={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "attention_bias": False,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
    },
    is_latent=True,
    predicts_ahead=True,
    experts=ROUTED,
    engine_keys=("topk_method", "scoring_func", "moe_layer_freq"),
)
