"""The default objective is what it was before it was put together of parts, bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.rollout_queue.batches import minibatch_sequences
from megatron_rl.trainer.loss_inputs import Prepared, tokens_of
from megatron_rl.trainer.model.collate import collate
from tests.obvious_losses import clipped_loss
from tests.rollout_queue.makers import make_group

GOLDEN = json.loads((Path(__file__).parent / "magistral_golden.json").read_text())
CFG = AlgorithmConfig()


def numbers(name: str) -> list[float]:
    return [float.fromhex(text) for text in GOLDEN[name]]


def sequences() -> list:
    groups = [
        make_group(number, group["rewards"], tokens=group["tokens"])
        for number, group in enumerate(GOLDEN["groups"])
    ]
    return minibatch_sequences(groups, find_advantage_functions(CFG))


def test_advantages_and_weights_are_those_that_were_stored() -> None:
    found = sequences()
    assert [s.advantage for s in found] == numbers("advantages")
    assert [s.weight for s in found] == numbers("weights")


def test_loss_and_gradient_are_those_that_were_stored() -> None:
    batch = collate(sequences())
    logprobs = torch.tensor(numbers("trainer_logprobs"), requires_grad=True)
    old = torch.tensor(numbers("generator_logprobs"))
    tokens = tokens_of(batch, logprobs, Prepared(), version=0)
    tokens = tokens.__class__(**(vars(tokens) | {"generator_logprobs": old}))
    objective = find_objective(CFG)
    result = objective.loss(tokens, objective.advantages(tokens), torch.zeros_like(old))
    (found,) = torch.autograd.grad(result.loss, logprobs)
    # On the same machine bit for bit; exp() of another may round in another way.
    loss = clipped_loss(logprobs, old, batch.advantages, batch.weights)
    (expected,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(result.loss, loss) and torch.equal(found, expected)
    assert result.loss.item() == pytest.approx(float.fromhex(GOLDEN["loss"]), rel=1e-6)
    np.testing.assert_allclose(found.numpy(), numbers("gradients"), rtol=1e-5, atol=1e-9)
    cut = result.sums["clip_fraction_low"] + result.sums["clip_fraction_high"]
    assert int(cut) == GOLDEN["clipped_tokens"]
