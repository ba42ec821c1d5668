"""Published models have their sizes: parameters, those of a rank, and bytes of a cached token."""

import math
from pathlib import Path

import pytest

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.plan.generator import kv_bytes_per_token
from megatron_rl.plan.parameters import model_parameters, stage_parameters
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import shape_of
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trainer_slices
from tests.tiny_models import MINISTRAL3
from tests.trainer.model.test_families import shape_of_config

OLMO = {
    "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip
PUBLISHED = {
    # Parameters of the published files without the layer that predicts ahead, bytes of a token's
    # keys and values or latents in bfloat16, and the keys of config.json that are no defaults.
    "deepseek-ai/DeepSeek-V3": (671_026_419_200, 61 * 576 * 2, "DeepseekV3", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 163840}),
    "moonshotai/Moonlight-16B-A3B": (15_960_110_208, 27 * 576 * 2, "DeepseekV3", {
        "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264,
        "num_hidden_layers": 27, "num_attention_heads": 16, "max_position_embeddings": 8192,
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1}),
    "zai-org/GLM-4.7-Flash": (29_943_393_920, 47 * 576 * 2, "Glm4MoeLite", {
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "num_attention_heads": 20}),
    # As transformers 5.19 builds them.
    "allenai/OLMo-2-1124-7B": (7_298_617_344, 32 * 2 * 4096 * 2, "Olmo2", OLMO),
    "allenai/Olmo-3-1025-7B": (7_298_011_136, 32 * 2 * 4096 * 2, "Olmo3", {
        **OLMO, "vocab_size": 100278, "max_position_embeddings": 65536, "rope_theta": 500000,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836,
                         "original_max_position_embeddings": 8192}}),
    "mistralai/Ministral-3-3B-Base-2512": (3_429_006_336, 26 * 2 * 8 * 128 * 2, "Ministral3", {
        "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 32, "max_position_embeddings": 262144,
        "tie_word_embeddings": True, "rope_parameters": MINISTRAL3["rope_parameters"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes(name: str) -> None:
    count, cached, family, values = PUBLISHED[name]
    shape = shape_of({"architectures": [f"{family}ForCausalLM"], **values}, Path(name))
    assert model_parameters(shape) == count
    assert sum(math.prod(size) for size in hf_shapes(shape).values()) == count
    for ranks in (1, 4):
        assert kv_bytes_per_token(shape, ranks, 2) == cached // (1 if shape.kv_rank else ranks)
        # Rank 0 holds none of the vocabulary's padding if there are several.
        place = Place(Share(0, ranks), expert_tensor=Share(0, ranks))
        held = sum(part.size for part in trainer_slices(shape, place))
        planned = stage_parameters(
            shape, ParallelConfig(tensor=ranks, expert_tensor=ranks), 0
        ).total
        padding = (2 - shape.is_tied) * shape.hidden * (shape.padded_vocab(1) - shape.vocab)
        assert planned == held + (ranks == 1) * padding


def test_magistral_small_has_the_shape_that_is_known(tmp_path: Path) -> None:
    # Mistral-Small-3.1-24B's text model: 23.6 billion parameters.
    shape = shape_of_config(
        tmp_path,
        "Mistral",
        vocab_size=131072,
        hidden_size=5120,
        intermediate_size=32768,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e9,
        sliding_window=None,
    )
    assert shape.heads * shape.head_dim == 4096 != shape.hidden
    assert model_parameters(shape) == 23_572_403_200
