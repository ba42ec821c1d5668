"""Vocabulary-parallel logprobs and entropy against torch's log_softmax on the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl import logprobs
from tests.distributed import run_ranks

TOKENS, VOCAB, PADDED = 37, 50, 64


def make_logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, PADDED, generator=rng) * 4).to(dtype)
    return logits, torch.randint(0, VOCAB, (TOKENS,), generator=rng)


def shard_results(dtype: torch.dtype, temperature: float) -> dict[str, torch.Tensor]:
    """What this rank computes on its columns of the logits."""
    dist.init_process_group("gloo")
    logprobs.CHUNK_TOKENS = 8
    logits, targets = make_logits(dtype)
    mine = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    values = logprobs.token_logprobs(
        mine, targets, vocab_size=VOCAB, group=dist.group.WORLD, temperature=temperature
    )
    (values.logprobs * torch.arange(TOKENS)).sum().backward()
    return {"logprobs": values.logprobs.detach(), "entropy": values.entropy, "grad": mine.grad}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_gradient_equal_log_softmax(ranks: int, temperature: float) -> None:
    logits, targets = make_logits(torch.float32)
    whole = logits[:, :VOCAB].clone().requires_grad_()
    reference = torch.log_softmax(whole / temperature, -1)
    chosen = reference.gather(1, targets[:, None])[:, 0]
    (chosen * torch.arange(TOKENS)).sum().backward()
    entropy = -(reference.exp() * reference).sum(-1)

    results = run_ranks(shard_results, ranks, torch.float32, temperature)
    for result in results:
        torch.testing.assert_close(result["logprobs"], chosen.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["entropy"], entropy.detach(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([result["grad"] for result in results], -1)
    torch.testing.assert_close(gradient[:, :VOCAB], whole.grad, rtol=1e-5, atol=1e-5)
    assert gradient[:, VOCAB:].abs().max() == 0


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits, targets = make_logits(torch.bfloat16)
    reference = torch.log_softmax(logits[:, :VOCAB].float(), -1).gather(1, targets[:, None])[:, 0]
    for result in run_ranks(shard_results, 2, torch.bfloat16, 1.0):
        torch.testing.assert_close(result["logprobs"], reference, rtol=1e-5, atol=1e-5)
        assert result["grad"].dtype == torch.bfloat16
