"""Random float32 models of every family an engine serves, and their shapes."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_rl.weights.layout.shape import ModelShape, read_shape

SIZES = {
    # A prime: no padding and no number of ranks divides it.
    "vocab_size": 251,
    "hidden_size": 64,
    # Two ranks of SGLang's CPU mode pad it to 192: the second has 64 of its 96 units.
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "Glm4Moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        # Padded to 64 by one rank of SGLang's CPU mode, of which there are two shared ones.
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}
EXPERTS["GptOss"] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "swiglu_limit": 1.5,
    "num_hidden_layers": 2,
}
LATENT_IN_ENGINES = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
"""Keys of published folders with latent attention that SGLang needs and transformers does not
write."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    **LATENT_IN_ENGINES,
}
EXPERTS["Phi3"] = {
    "sliding_window": 6,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "short_factor": [1 + n / 4 for n in range(6)], "long_factor": [4.0] * 6,
        "attention_factor": 1.3,
    },
    "original_max_position_embeddings": 128,
}  # fmt: skip
EXPERTS["Olmo3"] = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0,
            "original_max_position_embeddings": 16,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
EXPERTS["Mistral"] = {"sliding_window": 6}
EXPERTS["SmolLM3"] = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "no_rope_layers": [1, 1, 0, 0],
}
EXPERTS["Ministral3"] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "llama_4_scaling_beta": 0.3,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
EXPERTS["DeepseekV3"] = {**LATENT, "q_lora_rank": None}
EXPERTS["Glm4MoeLite"] = LATENT


def write_model(
    folder: Path, *, family: str, is_tied: bool, seed: int, **options: Any
) -> torch.nn.Module:
    """Write a random model of a family of transformers and return it."""
    sizes: dict[str, Any] = {**SIZES, **EXPERTS.get(family, {}), **options}
    if family in ("Qwen2", "Mixtral", "Phi3", "Olmo2", "Olmo3") or "kv_lora_rank" in sizes:
        # Qwen2 and Phi-3 have no such setting; SGLang 0.5.23 ignores Mixtral's and OLMo's.
        del sizes["head_dim"]
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=is_tied)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        # The same for every seed: no weight sync changes it.
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.5, 0.5, len(buffer)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases that are 1 and 0 would hide that they are used.
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(folder)
    return model


def shape_of(folder: Path) -> ModelShape:
    """Shape of a model that `write_model` wrote."""
    values = json.loads((folder / "config.json").read_text())
    architecture = values["architectures"][0]
    if "num_local_experts" not in values or architecture == "GptOssForCausalLM":
        return read_shape(folder)
    is_mixtral = architecture == "MixtralForCausalLM"
    return ModelShape(
        architecture=architecture,
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        ffn=values["intermediate_size"],
        heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        vocab=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        norm_eps=values["rms_norm_eps"],
        rope_theta=10000.0,
        rope_scaling=None,
        is_tied=values["tie_word_embeddings"],
        has_qkv_bias=False,
        has_qk_norm=not is_mixtral,
        sliding_window=None,
        experts=values["num_local_experts"],
        experts_per_token=values["num_experts_per_tok"],
        moe_ffn=values["intermediate_size" if is_mixtral else "moe_intermediate_size"],
    )
