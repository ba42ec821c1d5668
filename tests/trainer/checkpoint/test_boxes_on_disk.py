"""Boxes of parameters are written by Megatron's format and read back by any other cut."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from megatron_rl.config.tree import ParallelConfig
from megatron_rl.trainer.checkpoint.background_save import BackgroundSave, SavePlans
from megatron_rl.trainer.checkpoint.optimizer_state import _by_parameter, boxes_of
from megatron_rl.weights.folders.load import unwrap
from tests.distributed import run_ranks
from tests.tiny_models import QWEN3_MOE, load_on_rank, write_model

PREFIX = "optimizer.state.exp_avg"


def cut(owners: dict[Tensor, Any], values: list[Tensor], seed: int) -> dict[str, dict[str, Any]]:
    """Of each parameter the runs of as many replicas as there are cuts, in boxes."""
    chance = random.Random(seed)
    state: dict[str, dict[str, Any]] = {}
    for number, (parameter, owner) in enumerate(owners.items()):
        count = parameter.numel()
        cuts = [0, *sorted(chance.randint(0, count) for _ in range(3)), count]
        state[str(number)] = {}
        for start, end in itertools.pairwise(cuts):
            run = values[number].flatten()[start:end]
            for box in boxes_of(owner, parameter.shape, start, end):
                name = f"{len(state[str(number)])}"
                state[str(number)][name] = box.sharded(f"{PREFIX}.{box.of.key}", run, start)
    return state


def save_and_load(folder: Path, target: Path) -> tuple[int, bool, bool]:
    """(boxes, whether whole parameters come back, and whether boxes of other cuts do)."""
    loaded = load_on_rank(folder, ParallelConfig())
    owners = _by_parameter({"model0": unwrap(loaded.model[0]).sharded_state_dict()})
    owners = {p: owner for p, owner in owners.items() if isinstance(p, torch.nn.Parameter)}
    torch.manual_seed(5)
    values = [torch.randn(parameter.shape) for parameter in owners]
    state = cut(owners, values, seed=1)
    target.mkdir()
    save = BackgroundSave({"optimizer": state}, target, SavePlans())
    assert save.wait(time.monotonic() + 100)
    save.finalize()
    whole = {
        str(number): make_sharded_optimizer_tensor(owner, torch.zeros(p.shape), PREFIX)
        for number, (p, owner) in enumerate(owners.items())
    }
    found = dist_checkpointing.load({"optimizer": whole}, str(target))["optimizer"]
    is_whole = all(torch.equal(found[str(n)], value) for n, value in enumerate(values))
    zeros = [torch.zeros_like(value) for value in values]
    dist_checkpointing.load({"optimizer": cut(owners, zeros, seed=2)}, str(target))
    is_cut = all(torch.equal(*pair) for pair in zip(zeros, values, strict=True))
    return sum(map(len, state.values())), is_whole, is_cut


@pytest.mark.parametrize(
    ("family", "options"), [("Llama", {"is_tied": True}), ("Qwen3Moe", QWEN3_MOE)]
)
def test_what_was_cut_comes_back(tmp_path: Path, family: str, options: dict) -> None:
    write_model(tmp_path / "model", family=family, num_hidden_layers=2, **options)
    [(count, is_whole, is_cut)] = run_ranks(save_and_load, 1, tmp_path / "model", tmp_path / "c")
    # Many parameters are cut inside of rows, so that there are several boxes of each.
    assert count > 100 and is_whole and is_cut
