"""Logprobs from hidden states against torch's log_softmax over the whole vocabulary."""

from dataclasses import replace

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


def make_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=rng).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=rng).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=rng)


def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor, has_bonus: bool) -> torch.Tensor:
    """Weighted logprobs, and entropies weighted the other way round."""
    loss = (logprobs * SLOPES).sum()
    return loss - 0.5 * (entropy * SLOPES.flip(0)).sum() if has_bonus else loss


def results_of_rank(
    dtype: torch.dtype, temperature: float, vocab: int, chunk_tokens: int
) -> dict[str, torch.Tensor]:
    """What this rank computes with its rows of the weight."""
    dist.init_process_group("gloo")
    hidden, weight, targets = make_inputs(dtype)
    mine = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    hidden.requires_grad_()
    has_bonus = temperature != 1.0
    layer = OutputLayer(
        mine, vocab, dist.group.WORLD, temperature, chunk_tokens, differentiates_entropy=has_bonus
    )
    values = token_logprobs(hidden, targets % vocab, layer)
    loss_of(values.logprobs, values.entropy, has_bonus).backward()
    dist.all_reduce(hidden.grad)
    return {
        "logprobs": values.logprobs.detach(),
        "entropy": values.entropy.detach(),
        "hidden": hidden.grad,
        "weight": mine.grad,
    }


def reference(dtype: torch.dtype, temperature: float, vocab: int) -> dict[str, torch.Tensor]:
    hidden, weight, targets = make_inputs(dtype)
    hidden = hidden.requires_grad_()
    weight.requires_grad_()
    logits = torch.log_softmax((hidden @ weight[:vocab].t()).float() / temperature, -1)
    chosen = logits.gather(1, (targets % vocab)[:, None])[:, 0]
    entropy = -(logits.exp() * logits).sum(-1)
    loss_of(chosen, entropy, temperature != 1.0).backward()
    return {
        "logprobs": chosen.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


@pytest.mark.parametrize(
    ("ranks", "temperature", "vocab", "chunk_tokens"),
    [
        (1, 1.0, VOCAB, 1000),
        (1, 0.7, VOCAB, 1),
        (2, 1.0, VOCAB, 24),
        (2, 0.7, PADDED, 24),
        # The second rank holds padding alone.
        (2, 1.0, 30, 24),
    ],
)
def test_logprobs_entropy_and_gradients_equal_log_softmax(
    ranks: int, temperature: float, vocab: int, chunk_tokens: int
) -> None:
    expected = reference(torch.float32, temperature, vocab)
    results = run_ranks(
        results_of_rank, ranks, torch.float32, temperature, vocab, chunk_tokens
    )  # fmt: skip
    for result in results:
        for name in ("logprobs", "entropy", "hidden"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=2e-5)
    weight = torch.cat([result["weight"] for result in results])
    torch.testing.assert_close(weight, expected["weight"], rtol=1e-5, atol=2e-5)
    assert not weight[vocab:].any()


def test_bfloat16_products_are_reduced_in_float32() -> None:
    hidden, weight, targets = make_inputs(torch.bfloat16)
    logits = (hidden @ weight[:VOCAB].t()).float()
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    exact = reference(torch.float32, 1.0, VOCAB)
    for result in run_ranks(results_of_rank, 2, torch.bfloat16, 1.0, VOCAB, 24):
        torch.testing.assert_close(result["logprobs"], expected, rtol=1e-5, atol=1e-5)
        for name in ("hidden", "weight"):
            assert result[name].dtype == torch.bfloat16
        error = (result["hidden"].float() - exact["hidden"]).norm() / exact["hidden"].norm()
        assert error < 0.02


def errors_of_heads(temperature: float) -> dict[torch.dtype, tuple[float, ...]]:
    """Of logprobs, entropies and KL to another policy, by the dtype of the logits."""
    dist.init_process_group("gloo")
    hidden, weight, targets = make_inputs(torch.bfloat16)
    rows = torch.log_softmax(hidden.double() @ weight[:VOCAB].double().t() / temperature, -1)
    other = ReferenceLayer(hidden.roll(1, 0), weight.roll(1, 1))
    others = other.hidden.double() @ other.weight[:VOCAB].double().t() / temperature
    kl = (rows.exp() * (rows - torch.log_softmax(others, -1))).sum(-1)
    exact = rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1), kl
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        layer = OutputLayer(
            weight, VOCAB, dist.group.WORLD, temperature, 24, reference=other, logits_dtype=dtype
        )
        pairs = zip(token_logprobs(hidden, targets, layer), exact, strict=True)
        found[dtype] = tuple(
            float(((one - right) / (1 + right.abs())).abs().max()) for one, right in pairs
        )
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_logits_of_bfloat16_factors_are_those_of_float64(temperature: float) -> None:
    (found,) = run_ranks(errors_of_heads, 1, temperature)
    assert max(found[torch.float32]) < 2e-5
    assert found[torch.bfloat16][0] > 1e-3


def results_without_targets() -> tuple[int, bool, bool]:
    dist.init_process_group("gloo")
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(PADDED // 2, HIDDEN, requires_grad=True)
    layer = OutputLayer(weight, VOCAB, dist.group.WORLD, 1.0, 24)
    values = token_logprobs(hidden, torch.zeros(0, dtype=torch.int64), layer)
    values.logprobs.sum().backward()
    return len(values.entropy), bool(weight.grad.any()), hidden.grad.shape == hidden.shape


def test_ranks_without_targets_take_part_and_add_nothing() -> None:
    assert run_ranks(results_without_targets, 2) == [(0, False, True)] * 2


def overhead_of_rank(
    dtype: torch.dtype, n_tokens: int, chunk_tokens: int, logits_dtype: torch.dtype
) -> tuple[float, float]:
    """A rank's memory for logits, and the peak of its extra memory, over the bound."""
    dist.init_process_group("gloo")
    n_ids, n_hidden = 4096 // dist.get_world_size(), 64
    hidden = torch.randn(n_tokens, n_hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(n_ids, n_hidden, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 4000, (n_tokens,))
    layer = OutputLayer(
        weight, 4000, dist.group.WORLD, 1.0, chunk_tokens, logits_dtype=logits_dtype
    )
    # Apart, so that it is counted below too.
    of_logits = replace(layer, memory=LogitMemory()).take_memory(hidden).nbytes / (
        chunk_tokens * n_ids * 4
    )
    return of_logits, logprob_peak_over_bound(hidden, targets, layer)


@pytest.mark.parametrize(
    ("dtype", "logits_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_peak_memory_stays_below_the_chunk_whatever_the_count_of_tokens(
    dtype: torch.dtype, logits_dtype: torch.dtype, ranks: int
) -> None:
    for n_tokens in (300, 3000):
        for of_logits, of_all in run_ranks(
            overhead_of_rank, ranks, dtype, n_tokens, 128, logits_dtype
        ):
            # A pass holds logits of a third of the chunk or more: else nothing was measured.
            assert 0.95 * logits_dtype.itemsize / 12 < of_logits
            assert 0.95 * of_logits < of_all <= 1.0


def gradients_kept_and_handed_on() -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    hidden, weight, targets = make_inputs(torch.float32)
    weight.requires_grad_()
    kept = torch.ones(PADDED, HIDDEN)
    for gradient in (None, kept):
        layer = OutputLayer(weight, VOCAB, dist.group.WORLD, 1.0, 24, gradient)
        (token_logprobs(hidden, targets, layer).logprobs * SLOPES).sum().backward()
    return [kept, weight.grad]


def test_the_weight_gradient_is_added_where_it_is_kept() -> None:
    ((kept, handed_on),) = run_ranks(gradients_kept_and_handed_on, 1)
    torch.testing.assert_close(kept - 1, handed_on, rtol=1e-5, atol=1e-6)


def gradients_amid_others(interrupt: str) -> list[torch.Tensor]:
    """Of a pass whose memory was used by another one before the backward pass, and of itself."""
    dist.init_process_group("gloo")
    memory = LogitMemory()
    found = []
    for is_interrupted in (False, True):
        hidden, weight, targets = make_inputs(torch.float32)
        hidden.requires_grad_()
        layer = OutputLayer(weight, VOCAB, dist.group.WORLD, 1.0, 24, memory=memory)
        loss = (token_logprobs(hidden, targets, layer).logprobs * SLOPES).sum()
        if is_interrupted and interrupt == "forward":
            token_logprobs(hidden.detach().flip(0) * 3, targets, layer)
        elif is_interrupted and interrupt == "free":
            memory.free()
        elif is_interrupted:
            loss.backward(retain_graph=True)
            hidden.grad = None
        loss.backward()
        found.append(hidden.grad)
    return found


@pytest.mark.parametrize("interrupt", ["forward", "free", "backward"])
def test_logits_that_are_gone_are_computed_again(interrupt: str) -> None:
    ((undisturbed, found),) = run_ranks(gradients_amid_others, 1, interrupt)
    assert torch.equal(found, undisturbed) and undisturbed.any()
