"""GLM-4.5, 4.6 and 4.7 have DeepSeek's router; GLM-4.7-Flash has its latent attention too."""

from megatron_rl.weights.layout.families.deepseek import ROUTED
from megatron_rl.weights.layout.families.family import Family

GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    defaults={
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    },
    qkv_bias_key="attention_bias",
    qk_norm_key="use_qk_norm",
    rotates_part=True,
    predicts_ahead=True,
    experts=ROUTED,
)
GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    defaults={
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "attention_bias": False,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        # transformers does not read the key: it has a list of layers, and this means the same.
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
    is_latent=True,
    predicts_ahead=True,
    experts=ROUTED,
    engine_keys=("first_k_dense_replace",),
)
