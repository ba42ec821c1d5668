"""KL to a reference over the whole vocabulary, against a formula in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.trainer.model.logprobs import (
    LogitMemory,
    OutputLayer,
    ReferenceLayer,
    token_logprobs,
)
from tests.distributed import run_ranks
from tools.bench.train_peer import logprob_peak_over_bound

TOKENS, VOCAB, PADDED, HIDDEN = 37, 50, 64, 12
SLOPES = torch.arange(TOKENS) / TOKENS
NAMES = ("logprobs", "entropy", "reference_kl", "hidden", "weight")


def make_inputs(dtype: torch.dtype, distance: float = 1.0) -> dict[str, torch.Tensor]:
    """Of the policy, and of a reference so far from it."""
    rng = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=rng)

    hidden, weight = draw(TOKENS, HIDDEN), draw(PADDED, HIDDEN)
    return {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "other_hidden": (hidden + distance * draw(TOKENS, HIDDEN)).to(dtype),
        "other_weight": (weight + distance * draw(PADDED, HIDDEN)).to(dtype),
        "targets": torch.randint(0, VOCAB, (TOKENS,), generator=rng),
    }


def loss_of(logprobs: Any, entropy: Any, reference_kl: Any) -> torch.Tensor:
    """Each with other weights on the tokens."""
    loss = (logprobs * SLOPES).sum() - 0.5 * (entropy * SLOPES.flip(0)).sum()
    return loss + (reference_kl * (0.3 + SLOPES.square())).sum()


def results_of_rank(
    dtype: torch.dtype, setting: dict[str, Any], distance: float = 1.0
) -> dict[str, torch.Tensor]:
    """What this rank computes with its rows of the weights."""
    dist.init_process_group("gloo")
    given = make_inputs(dtype, distance)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = given["weight"].chunk(ranks)[rank].clone().requires_grad_()
    others = given["other_weight"].chunk(ranks)[rank].clone()
    hidden = given["hidden"].requires_grad_()
    gradient = torch.ones(mine.shape) if setting["is_fused"] else None
    layer = OutputLayer(
        mine,
        setting["vocab"],
        dist.group.WORLD,
        setting["temperature"],
        setting["chunk_tokens"],
        gradient=gradient,
        is_sole_user=setting["is_fused"],
        differentiates_entropy=True,
        reference=ReferenceLayer(given["other_hidden"], others),
    )
    targets = given["targets"] % setting["vocab"]
    values = token_logprobs(hidden, targets, layer)
    # The same but for the KL, which must change nothing else.
    alone = token_logprobs(hidden, targets, replace(layer, reference=None))
    assert alone.reference_kl is None
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(getattr(values, name), getattr(alone, name))
    loss_of(*values).backward()
    dist.all_reduce(hidden.grad)
    if gradient is not None:
        assert mine.grad_added_to_main_grad
    found = mine.grad if gradient is None else gradient - 1
    return dict(zip(NAMES, (*(v.detach() for v in values), hidden.grad, found), strict=True))


def expected_results(vocab: int, temperature: float, distance: float = 1.0) -> dict[str, Any]:
    """In float64, all at once."""
    given = {
        k: v.double() if v.is_floating_point() else v
        for k, v in make_inputs(torch.float32, distance).items()
    }
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()

    def log_softmax(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(rows @ columns[:vocab].t() / temperature, -1)

    own = log_softmax(hidden, weight)
    other = log_softmax(given["other_hidden"], given["other_weight"])
    values = (
        own.gather(1, (given["targets"] % vocab)[:, None])[:, 0],
        -(own.exp() * own).sum(-1),
        (own.exp() * (own - other)).sum(-1),
    )
    loss_of(*values).backward()
    return dict(zip(NAMES, (*(v.detach() for v in values), hidden.grad, weight.grad), strict=True))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("ranks", "temperature", "vocab", "chunk_tokens"),
    [
        (1, 1.0, VOCAB, 1000),
        (1, 0.7, VOCAB, 1),
        (2, 1.0, VOCAB, 24),
        (2, 0.7, PADDED, 24),
        # The second rank holds padding alone.
        (2, 0.7, 30, 24),
    ],
)
def test_kl_and_its_gradient_equal_the_formula(
    ranks: int, temperature: float, vocab: int, chunk_tokens: int, is_fused: bool
) -> None:
    setting = {
        "temperature": temperature,
        "vocab": vocab,
        "chunk_tokens": chunk_tokens,
        "is_fused": is_fused,
    }
    expected = expected_results(vocab, temperature)
    results = run_ranks(results_of_rank, ranks, torch.float32, setting)
    limit = {"rtol": 1e-5, "atol": 2e-5, "check_dtype": False}
    for result in results:
        for name in NAMES[:-1]:
            torch.testing.assert_close(result[name], expected[name], **limit)
    weight = torch.cat([result["weight"] for result in results])
    torch.testing.assert_close(weight, expected["weight"], **limit)
    assert not weight[vocab:].any()


SETTING = {"temperature": 1.0, "vocab": VOCAB, "chunk_tokens": 24, "is_fused": False}


def test_a_policy_near_its_reference_keeps_its_kl_through_the_rounding() -> None:
    expected = expected_results(VOCAB, 1.0, distance=3e-3)["reference_kl"]
    assert 1e-5 < expected.mean() < 1e-3
    (found,) = run_ranks(results_of_rank, 1, torch.float32, SETTING, 3e-3)
    torch.testing.assert_close(found["reference_kl"].double(), expected, rtol=0, atol=2e-6)
    (found,) = run_ranks(results_of_rank, 1, torch.float32, SETTING, 0.0)
    assert found["reference_kl"].abs().max() < 1e-6


def test_bfloat16_logits_are_compared_in_float32() -> None:
    exact = expected_results(VOCAB, 1.0)
    for result in run_ranks(results_of_rank, 2, torch.bfloat16, SETTING):
        for name in ("reference_kl", "hidden"):
            error = (result[name].double() - exact[name]).norm() / exact[name].norm()
            assert error < 0.02, name


def peak_over_bound(dtype: torch.dtype, n_tokens: int) -> float:
    dist.init_process_group("gloo")
    hidden = torch.randn(n_tokens, 64, dtype=dtype, requires_grad=True)
    weight = torch.randn(4096, 64, dtype=dtype, requires_grad=True)
    others = ReferenceLayer(torch.randn_like(hidden), torch.randn_like(weight))
    layer = OutputLayer(weight, 4000, dist.group.WORLD, 1.0, 128, reference=others)
    layer = replace(layer, differentiates_entropy=True, memory=LogitMemory())
    targets = torch.randint(0, 4000, (n_tokens,))
    return logprob_peak_over_bound(hidden, targets, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_stays_below_the_chunk_with_two_policies(dtype: torch.dtype) -> None:
    for n_tokens in (300, 3000):
        (found,) = run_ranks(peak_over_bound, 1, dtype, n_tokens)
        assert 0.4 < found <= 1.0
