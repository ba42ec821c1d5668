"""GLM-4.5, 4.6 and 4.7: DeepSeek's router over grouped-query attention."""

from megatron_rl.weights.layout.families.family import Experts, Family

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
    experts=Experts(
        count_keys=("n_routed_experts", "num_local_experts"),
        dense_key="first_k_dense_replace",
        shared="shared_experts",
        is_corrected=True,
    ),
    # SGLang would store the shared expert as one more routed expert, on CUDA alone.
    engine_flags=("--disable-shared-experts-fusion",),
)
