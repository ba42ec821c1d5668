"""Schedule by hand; a step that is not finite touches nothing, on any rank."""

from dataclasses import dataclass
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


@dataclass
class Steps:
    """A step without gradient from weights of one, then one whose norm is above skip_grad_norm."""

    decayed: dict[int, list[float]]  # by dimensions of a parameter: the weights after the first
    exploded: StepResult
    gradients: list[str]  # names of parameters that still have one


def decay_then_explode(folder: Path, parallel: ParallelConfig) -> Steps:
    loaded = load_on_rank(folder, parallel)
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), loaded.model)
    parameters = named_parameters(loaded.model)
    for parameter in parameters.values():
        torch.nn.init.ones_(parameter)
    zero_gradients(loaded.model, optimizer)
    step_if_finite(optimizer, lr=0.01)
    decayed: dict[int, set[float]] = {}
    for parameter in parameters.values():
        decayed.setdefault(parameter.dim(), set()).update(parameter.flatten().tolist())
        parameter.main_grad.fill_(1.0)
    exploded = step_if_finite(optimizer, lr=0.01, skip_norm=0.5)
    left = [name for name, one in parameters.items() if one.grad is not None and one.grad.any()]
    return Steps({count: sorted(found) for count, found in decayed.items()}, exploded, left)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Steps]:
    """Of one rank, and of the first of two tensor ranks."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_model(folder)
    layouts = (ParallelConfig(), ParallelConfig(tensor=2))
    return [run_ranks(decay_then_explode, each.world_size, folder, each)[0] for each in layouts]


def test_norm_counts_each_parameter_once_under_tensor_parallelism(steps: list[Steps]) -> None:
    # Padded vocabulary is 256 under both splits, so both have the same count of elements.
    assert steps[1].exploded.grad_norm == pytest.approx(steps[0].exploded.grad_norm)


def test_matrices_decay_and_norms_do_not(steps: list[Steps]) -> None:
    for each in steps:
        # A matrix loses lr * weight_decay = 0.01 * 0.1 of itself.
        assert each.decayed == {1: [1.0], 2: [pytest.approx(0.999)]}


def test_an_explosion_leaves_no_gradient(steps: list[Steps]) -> None:
    for each in steps:
        assert each.exploded.has_exploded and each.gradients == []
