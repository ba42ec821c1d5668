"""Memory of engines: against transformers' cache and the plan of a weight sync."""

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.cli.plan_weights import forecast
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import GIB
from megatron_rl.config.tree import GeneratorConfig
from megatron_rl.plan.generator import (
    engine_memory,
    engine_rank_bytes,
    kv_bytes_per_token,
    sglang_reserve_bytes,
)
from megatron_rl.plan.weight_sync import sync_cost
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import QWEN3_MOE, write_model

TOKENS = 12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_keys_and_values_take_what_transformers_keeps(tmp_path: Path, kv_heads: int) -> None:
    model = write_model(
        tmp_path, family="Qwen3", head_dim=32, num_key_value_heads=kv_heads, dtype=torch.bfloat16
    )
    cache = model(torch.arange(TOKENS)[None], use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kept == TOKENS * kv_bytes_per_token(read_shape(tmp_path), 1, 2)


def test_ranks_beyond_the_key_value_heads_hold_copies(tmp_path: Path) -> None:
    write_model(tmp_path)
    shape = read_shape(tmp_path)
    # 4 layers, keys and values, 2 heads of 16, float32.
    assert [kv_bytes_per_token(shape, ranks, 4) for ranks in (1, 2, 4)] == [1024, 512, 512]


@pytest.mark.parametrize(
    ("family", "options", "generator"),
    [
        ("Llama", {}, {"tensor_parallel": 2}),
        ("Qwen2", {"is_tied": True}, {"tensor_parallel": 4}),
        ("Qwen3Moe", QWEN3_MOE, {"tensor_parallel": 2}),
        ("Qwen3Moe", QWEN3_MOE, {"tensor_parallel": 2, "expert_parallel": 2}),
        ("Llama", {}, {"engine": "hf"}),
    ],
    ids=["tp2", "more-ranks-than-kv-heads", "experts", "divided-experts", "hf"],
)
def test_weights_of_an_engine_are_what_a_weight_sync_brings(
    tmp_path: Path, family: str, options: dict, generator: dict
) -> None:
    write_model(tmp_path, family=family, **options)
    overrides = [f"generator.{key}={json.dumps(value)}" for key, value in generator.items()]
    config = load_config(
        None, [f"model.path={json.dumps(str(tmp_path))}", "model.dtype=float32", *overrides]
    )
    planned = forecast(config)
    found = engine_rank_bytes(read_shape(tmp_path), config.generator, 4)
    assert tuple(found) == planned.received
    cost = sync_cost(read_shape(tmp_path), config, bytes_per_s=1e6)
    assert cost.total_bytes == sum(planned.sent)
    # A single sender is the slower end, unless there is a single receiver.
    assert cost.seconds == pytest.approx(sum(planned.sent) / 1e6)


def test_what_weights_and_reserve_leave_is_room_for_the_cache(tmp_path: Path) -> None:
    write_model(tmp_path)
    shape, generator = read_shape(tmp_path), GeneratorConfig(max_running=16)
    memory = engine_memory(shape, generator, item_bytes=2, gpu_bytes=24 * GIB)
    # 0.5 GiB, 1.5 MiB for each of 4096 tokens, 128 MiB for a rank, 2 MiB for 16 requests.
    assert memory.reserve == sglang_reserve_bytes(24 * GIB, tensor=1, max_running=16)
    assert memory.reserve == (512 + 6144 + 128 + 32) << 20
    assert memory.kv_room == 24 * GIB - memory.reserve - memory.weights
    assert memory.kv_tokens == memory.kv_room // (2 * 4 * 2 * 16 * 2)
    none = engine_memory(shape, generator, item_bytes=2, gpu_bytes=1 * GIB)
    assert none.kv_room < 0 and none.kv_tokens == 0


def test_impossible_ranks_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(InputError, match="generator.tensor_parallel = 3 is not possible"):
        engine_rank_bytes(read_shape(tmp_path), GeneratorConfig(tensor_parallel=3), 2)
