"""Logprobs on CUDA, and how well an optimizer step uses the GPU.

Each test is a row of docs/gpu-evidence.md. One GPU is enough.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.trainer.model.logprobs import OutputLayer, token_logprobs
from tests.distributed import run_ranks
from tools.bench.train import on_gpu
from tools.bench.train_peer import logprob_peak_over_bound

pytestmark = pytest.mark.gpu
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
TOKENS, VOCAB, HIDDEN, CHUNK_TOKENS = 4096, 32_000, 1024, 512


def errors_and_peak(logits_dtype: torch.dtype) -> tuple[dict[str, float], float]:
    """Relative errors against log_softmax in float32 of the same bf16 inputs; peak over bound."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", 0)
    rng = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=rng, device=device).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=rng, device=device).mul_(0.05).bfloat16()
    weight.requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=rng, device=device)
    kept = torch.zeros(VOCAB, HIDDEN, device=device)
    layer = OutputLayer(
        weight, VOCAB, dist.group.WORLD, 1.0, CHUNK_TOKENS, kept, logits_dtype=logits_dtype
    )
    values = token_logprobs(hidden, targets, layer)
    values.logprobs.sum().backward()
    found = {"logprobs": values.logprobs, "hidden": hidden.grad, "weight": kept}

    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = weight.detach().float().requires_grad_()
    rows = torch.log_softmax(exact_hidden @ exact_weight.t(), -1)
    expected = {"logprobs": rows.gather(1, targets[:, None])[:, 0]}
    expected["logprobs"].sum().backward()
    expected |= {"hidden": exact_hidden.grad, "weight": exact_weight.grad}
    errors = {
        name: float((found[name].detach().float() - value).norm() / value.norm())
        for name, value in expected.items()
    }
    del rows, expected
    hidden.grad = None
    return errors, logprob_peak_over_bound(hidden, targets, layer)


@pytest.mark.parametrize(
    ("logits_dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=str
)
def test_logprobs_in_bf16_are_near_float32_within_their_memory(
    logits_dtype: torch.dtype, most: float, record_property: Callable[[str, object], None]
) -> None:
    errors, over_bound = run_ranks(errors_and_peak, 1, logits_dtype, timeout_s=300)[0]
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    record_property("figure", f"relative errors {told}; peak over bound {over_bound:.3f}")
    assert errors["logprobs"] < most
    assert all(error < 1e-2 for error in errors.values()), errors
    assert over_bound <= 1.0


@pytest.mark.timeout(1800)
def test_utilisation_in_bf16_and_fp8_is_reported(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = on_gpu(tmp_path)
    record_property("figure", ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    assert found["mfu_bf16"] is not None and 0.1 < found["mfu_bf16"] < 1
    assert ("mfu_fp8" in found) == HAS_ENGINE
    if HAS_ENGINE:
        assert 0.05 < found["mfu_fp8"] < 1
