"""Between a microbatch's forward pass and its backward pass nothing waits for the device.

Meta tensors have no values, so whatever would read one raises: boolean indexing, bincount, item().
Their kernels are those of plain torch, as on CUDA.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.algorithms.soft_value import SoftValues
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.tree import Config
from megatron_rl.trainer.loss_inputs import Prepared
from megatron_rl.trainer.model.collate import MicroBatch
from megatron_rl.trainer.model.logprobs import ReferenceLayer
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.value_head import ValueHead
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, my_share
from tests.tiny_models import write_model

META = torch.device("meta")
EXACT_TO_GO = {"kl": {"placement": "loss", "estimator": "exact", "horizon": "to_go"}}
OBJECTIVES = {name: {"preset": name} for name in PRESETS} | {"exact to go": EXACT_TO_GO}


class DeviceAlone(TorchDispatchMode):
    """Refuses tensors made of Python numbers, whose copy to the device waits for it, and what torch
    refuses on CUDA with deterministic algorithms."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        assert "lift_fresh" not in name, "a tensor is made of Python numbers"
        is_sum_so_far = "cumsum" in name and args[0].is_floating_point()
        assert not is_sum_so_far and "histc" not in name, f"{name} repeats no sums on CUDA"
        return function(*args, **(kwargs or {}))


def everything_prepared(batch: MicroBatch, hidden: int, weight: torch.Tensor) -> Prepared:
    """Of a microbatch, all that an objective may read."""
    tokens, sequences = torch.empty(len(batch.targets), device=META), len(batch.group_of)
    values = torch.empty(sequences, device=META)
    return Prepared(
        proximal_logprobs=tokens,
        reference_logprobs=tokens,
        reference_layer=ReferenceLayer(tokens.new_empty(len(tokens), hidden), weight),
        features=torch.empty(sequences, hidden + 1, device=META),
        soft=SoftValues(values, values),
        advantages=tokens,
    )


def loss_on_meta(policy: Policy, cfg: Config, given: dict[str, Any]) -> tuple[int, bool]:
    """Sums that are reported, and whether the weight has its gradient."""
    algorithm = AlgorithmConfig.model_validate({"reference": {"policy": "start"}, **given})
    trainer = Trainer(policy, find_objective(algorithm), cfg.optimizer, 1)
    batch, _ = next(iter(trainer._passes.inputs(my_share(1000))))
    batch = batch.moved(lambda tensor: tensor.to(META))
    layer, width = policy.chunks[-1].module.output_layer, policy.shape.hidden
    weight = torch.nn.Parameter(torch.empty_like(layer.weight, device=META))
    weight.main_grad = torch.empty_like(weight)
    kept, layer.weight = layer.weight, weight
    if trainer.value_head is not None:
        trainer.value_head = ValueHead(width, 1e-2, META)
    hidden = torch.empty(1, batch.tokens.shape[1], width, device=META, requires_grad=True)
    prepared = everything_prepared(batch, width, torch.empty_like(weight))
    if not algorithm.kl.is_exact:
        prepared = dataclasses.replace(prepared, reference_layer=None)
    if not trainer._objective.needs_groups:
        prepared = dataclasses.replace(prepared, advantages=None)
    with DeviceAlone():
        loss, _, report = trainer._loss(batch, 0, prepared, hidden)
        loss.backward()
    layer.weight = kept
    return len(report), hidden.grad is not None


def all_losses(cfg: Config) -> dict[str, tuple[int, bool]]:
    with open_policy(cfg) as policy:
        dist.all_reduce = lambda *args, **kwargs: None
        return {name: loss_on_meta(policy, cfg, given) for name, given in OBJECTIVES.items()}


def test_no_loss_reads_a_value_before_its_backward_pass(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=VOCAB, num_hidden_layers=1)
    cfg = load_config(None, [f"model.path={tmp_path}", "model.dtype=float32"])
    found = run_ranks(all_losses, 1, cfg)[0]
    assert found.keys() == OBJECTIVES.keys()
    assert all(reports > 1024 and has_gradient for reports, has_gradient in found.values())
