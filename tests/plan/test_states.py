"""Predicted bytes of weights, gradients and optimizer state are those that Megatron allocates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.tree import OptimizerConfig, ParallelConfig
from megatron_rl.plan.parameters import (
    RankParameters,
    dense_shards,
    expert_shards,
    stage_parameters,
)
from megatron_rl.plan.trainer_memory import state_bytes
from megatron_rl.trainer.optimizer import build_optimizer, step_if_finite
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import run_ranks
from tests.tiny_models import QWEN3_MOE, accumulate_gradients, load_on_rank, write_model

TOLERANCE = 0.02
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def allocated(folder: Path, parallel: ParallelConfig, dtype: str) -> dict[str, int]:
    """Bytes on this rank after one step, by what they are for."""
    loaded = load_on_rank(folder, parallel, dtype)
    optimizer = build_optimizer(OptimizerConfig(), loaded.model)
    ids = torch.arange(16)[None] % loaded.shape.vocab
    accumulate_gradients(loaded, [ids])
    assert not step_if_finite(optimizer, lr=1e-3).was_skipped
    chunk = loaded.model[0]
    parameters = list(chunk.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    stepped = [
        (part.optimizer, parameter)
        for part in optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    ]
    return {
        "weights": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(
            buffer.grad_data.nbytes for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        "masters": sum(p.nbytes for _, p in stepped if p.untyped_storage().data_ptr() not in own),
        "moments": sum(
            adam.state[parameter][name].nbytes
            for adam, parameter in stepped
            for name in ("exp_avg", "exp_avg_sq")
        ),
    }


def predicted(folder: Path, parallel: ParallelConfig, dtype: str, rank: int) -> dict[str, int]:
    """The same by the formulas."""
    stage = rank // (parallel.world_size // parallel.pipeline)
    parameters = stage_parameters(read_shape(folder), parallel, stage)
    states = state_bytes(parameters, parallel, item_bytes=ITEM_BYTES[dtype])
    names = ("weights", "gradients", "masters", "moments")
    return {name: getattr(states, name) for name in names}


DENSE = {"family": "Llama", "is_tied": False}
SHARDED = {"data": 2, "distributed_optimizer": True}
EXPERTS = {"family": "Qwen3Moe", **QWEN3_MOE}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "parallel", "dtype"),
    [
        (DENSE, {}, "bfloat16"),
        (DENSE, {}, "float32"),
        (DENSE, {"tensor": 2}, "bfloat16"),
        ({"family": "Qwen2", "is_tied": True}, {"pipeline": 2}, "bfloat16"),
        (DENSE, SHARDED, "bfloat16"),
        (DENSE, SHARDED, "float32"),
        (EXPERTS, {"data": 2, "expert": 2}, "bfloat16"),
        (EXPERTS, {**SHARDED, "expert": 2}, "bfloat16"),
        (EXPERTS, {"tensor": 2, "sequence": True, **SHARDED, "expert": 2}, "bfloat16"),
    ],
    ids=["tp1", "tp1-fp32", "tp2", "pp2-tied", "dp2-sharded", "dp2-sharded-fp32", "ep2",
         "ep2-sharded", "tp2-dp2-ep2-sharded"],
)  # fmt: skip
def test_predicted_bytes_are_those_allocated(
    tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any], dtype: str
) -> None:
    write_model(tmp_path, dtype=getattr(torch, dtype), **model)
    sizes = ParallelConfig(**parallel)
    found = run_ranks(allocated, sizes.world_size, tmp_path, sizes, dtype)
    for rank, real in enumerate(found):
        forecast = predicted(tmp_path, sizes, dtype, rank)
        assert forecast == pytest.approx(real, rel=TOLERANCE), f"rank {rank}"
        assert forecast["weights"] == real["weights"], "weights have no padding of their own"


def test_state_of_offloaded_and_fp8_parameters() -> None:
    parameters, parallel = RankParameters(dense=600, expert=400), ParallelConfig()
    plain = state_bytes(parameters, parallel, item_bytes=2)
    assert (plain.weights, plain.gradients, plain.masters, plain.moments) == (
        2000, 4000, 4000, 8000,
    )  # fmt: skip
    away = state_bytes(parameters, parallel, item_bytes=2, is_offloaded=True)
    assert (away.masters, away.moments, away.total) == (0, 0, 6000)
    copied = {"item_bytes": 2, "fp8_elements": 700}
    assert state_bytes(parameters, parallel, **copied).weights == 3400
    # Megatron's buffer of uint8 has the codes by rows; beside it are the transposed ones.
    kept = state_bytes(parameters, parallel, keeps_fp8_alone=True, **copied)
    assert kept.weights == 300 * 2 + 700 * 2


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    parallel = ParallelConfig(tensor=2, data=4, context=2, expert=4, distributed_optimizer=True)
    # 16 ranks of a stage: 8 hold the same dense shard, 4 the same experts.
    assert (dense_shards(parallel), expert_shards(parallel)) == (8, 4)
    states = state_bytes(RankParameters(dense=80, expert=40), parallel, item_bytes=2)
    assert states.moments == 8 * (80 // 8 + 40 // 4)
