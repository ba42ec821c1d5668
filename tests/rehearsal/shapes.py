"""config.json of published models, for rehearsals that need no weights."""

import json
from pathlib import Path
from typing import Any

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
TINY = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 250,
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}  # fmt: skip
TINY_GPT_OSS = TINY | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "attention_bias": True,
    "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
SMOLLM2_135M = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
QWEN25_15B = {
    **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
QWEN25_7B = QWEN25_15B | {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL_24B = {
    **_COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
    "sliding_window": None,
}  # fmt: skip
MISTRAL_123B = MISTRAL_24B | {
    "vocab_size": 32768, "hidden_size": 12288, "intermediate_size": 28672, "num_hidden_layers": 88,
    "num_attention_heads": 96,
}  # fmt: skip
QWEN3_30B_A3B = {
    **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GLM_45_AIR = {
    **_COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS_20B = {
    **_COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "attention_bias": True, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "truncate": False, "original_max_position_embeddings": 4096},
}  # fmt: skip
EXAMPLES = {
    "one_gpu": QWEN25_15B,
    "one_node": QWEN25_7B,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "magistral_24b": MISTRAL_24B,
    "magistral_medium_like": MISTRAL_123B,
    "magistral_stages": MISTRAL_24B,
}
"""Example -> a model of the size that it is for."""


def write_shape(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder
