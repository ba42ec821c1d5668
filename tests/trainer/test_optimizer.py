"""Schedule by hand; a step that is not finite touches nothing, on any rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.tree import OptimizerConfig, ParallelConfig
from megatron_rl.trainer.optimizer import (
    StepResult,
    build_optimizer,
    lr_at,
    step_if_finite,
    zero_gradients,
)
from megatron_rl.weights.layout.local_names import named_parameters
from tests.distributed import run_ranks
from tests.tiny_models import load_on_rank, write_model


def test_warm_up_then_constant() -> None:
    cfg = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [lr_at(step, cfg, 10) for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_least_rate() -> None:
    cfg = OptimizerConfig(lr=1.0, warmup_steps=2, lr_schedule="linear", min_lr_ratio=0.2)
    rates = [lr_at(step, cfg, 6) for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert lr_at(50, cfg, 6) == pytest.approx(0.2)


def test_cosine_decay_is_half_a_period() -> None:
    cfg = OptimizerConfig(lr=1.0, warmup_steps=1, lr_schedule="cosine", min_lr_ratio=0.2)
    # 0.2 + 0.8 (1 + cos(pi d)) / 2 at d = 0, 1/3, 1/2, 2/3, 1 of six steps.
    assert lr_at(0, cfg, 7) == 1.0
    assert [lr_at(step, cfg, 7) for step in (2, 3, 4, 6)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert lr_at(1, cfg, 7) == pytest.approx(0.2 + 0.4 * (1 + 3**0.5 / 2))
    assert lr_at(50, cfg, 7) == pytest.approx(0.2)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert lr_at(0, OptimizerConfig(lr=3.0, warmup_steps=0), 5) == 3.0


def steps_around_an_infinity(
    folder: Path, parallel: ParallelConfig, dtype: str, poisoned: str
) -> tuple[list[StepResult], list[bool]]:
    """Steps with gradient 1, infinities on the last rank, 1; whether each changed weights."""
    loaded = load_on_rank(folder, parallel, dtype)
    optimizer = build_optimizer(OptimizerConfig(clip_grad_norm=0.5), loaded.model)
    parameters = named_parameters(loaded.model)
    results, changes = [], []
    for is_poisoned in (False, True, False):
        zero_gradients(loaded.model, optimizer)
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        for name, parameter in parameters.items():
            parameter.main_grad.fill_(1.0)
            if is_poisoned and is_last_rank and name.startswith(poisoned):
                parameter.main_grad[-1] = torch.inf
        before = [parameter.clone() for parameter in parameters.values()]
        results.append(step_if_finite(optimizer, lr=0.1))
        after = parameters.values()
        changes.append(not all(map(torch.equal, before, after)))
    state = optimizer.chained_optimizers[0].optimizer.state.values()
    assert all(value["exp_avg"].isfinite().all() for value in state)
    return results, changes


@pytest.mark.parametrize(
    ("parallel", "dtype", "poisoned"),
    [
        # The norm is replicated, and the gradient norm counts it on the first tensor rank only.
        (ParallelConfig(tensor=2), "bfloat16", "decoder.final_layernorm"),
        (ParallelConfig(pipeline=2), "float32", "decoder.final_layernorm"),
        # Each data rank steps a shard of its own.
        (ParallelConfig(data=2, distributed_optimizer=True), "bfloat16", ""),
    ],
)
def test_infinity_on_one_rank_skips_the_step_on_all(
    parallel: ParallelConfig, dtype: str, poisoned: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "llama")
    ranks = run_ranks(steps_around_an_infinity, 2, tmp_path / "llama", parallel, dtype, poisoned)
    for results, changes in ranks:
        assert [result.was_skipped for result in results] == [False, True, False]
        assert changes == [True, False, True]
        assert results[0].grad_norm == pytest.approx(ranks[0][0][0].grad_norm)


def test_norm_counts_each_parameter_once_under_tensor_parallelism(tmp_path: Path) -> None:
    write_model(tmp_path / "llama")
    norms = []
    for parallel in (ParallelConfig(), ParallelConfig(tensor=2)):
        ranks = run_ranks(norm_of_ones, parallel.world_size, tmp_path / "llama", parallel)
        norms.append(ranks[0])
    # Padded vocabulary is 256 under both splits, so both have the same count of elements.
    assert norms[1] == pytest.approx(norms[0])


def norm_of_ones(folder: Path, parallel: ParallelConfig) -> float:
    loaded = load_on_rank(folder, parallel)
    optimizer = build_optimizer(OptimizerConfig(), loaded.model)
    for parameter in loaded.model[0].parameters():
        parameter.main_grad.fill_(1.0)
    return step_if_finite(optimizer, lr=0.0).grad_norm
