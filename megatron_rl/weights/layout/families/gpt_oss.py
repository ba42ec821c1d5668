"""gpt-oss: sinks in the softmax of attention, biases in every projection, experts in one tensor."""

from megatron_rl.weights.layout.families.family import Experts, Family

GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
    },
    qkv_bias_key="attention_bias",
    mixes_windows=True,
    has_biases=True,
    has_sinks=True,
    experts=Experts(router="router", units_key="intermediate_size", normalises=True, fused="pairs"),
)
