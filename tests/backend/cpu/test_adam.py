"""ForeachAdam computes torch's AdamW, and mends what torch's AdamW breaks in Megatron."""

from pathlib import Path

import pytest
import torch

from megatron_rl.backend.cpu import adam
from megatron_rl.backend.cpu.adam import ForeachAdam
from megatron_rl.config.tree import OptimizerConfig, ParallelConfig
from megatron_rl.trainer.optimizer import build_optimizer
from tests.distributed import run_ranks
from tests.tiny_models import load_on_rank, write_model


def test_updates_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = [ForeachAdam(ours, **options), torch.optim.AdamW(theirs, **options)]
    for _ in range(10):
        for mine, reference in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            reference.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)


def test_parameter_without_gradient_is_left_alone() -> None:
    parameters = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    parameters[0].grad = torch.ones(2)
    optimizer = ForeachAdam(parameters, lr=0.1)
    optimizer.step()
    assert torch.equal(parameters[1], torch.ones(2)) and parameters[1] not in optimizer.state
    torch.testing.assert_close(parameters[0], torch.full((2,), 0.9))


def steps_after_resume(folder: Path, use_torch: bool) -> list[set[int]]:
    """Step counts after each of 3 updates; the state is saved and restored after the first."""
    if use_torch:
        adam.replace_torch_fallback = lambda: None
    loaded = load_on_rank(folder, ParallelConfig(data=2, distributed_optimizer=True), "bfloat16")
    optimizer = build_optimizer(OptimizerConfig(), loaded.model)
    counts = []
    for update in range(3):
        for parameter in loaded.model[0].parameters():
            parameter.main_grad.fill_(1.0)
        optimizer.step()
        holders = [*optimizer.optimizer.state.values(), *optimizer.param_groups]
        counts.append({int(holder["step"]) for holder in holders if "step" in holder})
        if update == 0:
            optimizer.load_state_dict(optimizer.state_dict())
    return counts


@pytest.mark.parametrize("use_torch", [True, False])
def test_step_count_survives_a_resume_only_with_our_adam(use_torch: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "llama")
    for counts in run_ranks(steps_after_resume, 2, tmp_path / "llama", use_torch):
        assert (counts == [{1}, {2}, {3}]) is not use_torch
