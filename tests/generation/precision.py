"""In what dtype and where the engines of these tests compute, and how near transformers they are.

On the CPU in float32, of which most can be told. SGLang's kernels on CUDA are of 16 bits, so there
it is bfloat16, beside a model whose weights are rounded to it. `MEGATRON_RL_TEST_DTYPE=bfloat16`
takes that dtype on the CPU, too.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.weights.exchange.transport import IPC

IS_ON_CPU = sglang_cpu.is_needed()
DTYPE_NAME = os.environ.get("MEGATRON_RL_TEST_DTYPE", "float32" if IS_ON_CPU else "bfloat16")
DTYPE = getattr(torch, DTYPE_NAME)
IS_EXACT = DTYPE is torch.float32
DEVICE = torch.device("cpu") if IS_ON_CPU else torch.device("cuda", 0)
"""Of a trainer rank beside the engine."""
BACKEND = "gloo" if IS_ON_CPU else IPC
"""Over which slices reach the engine: two ranks of NCCL share no GPU."""
MEAN, MOST = 0.09, 0.35
"""Of differences of logprobs in bfloat16: three times what SGLang on a CPU has over a completion of
some tokens, and of one."""
PATIENCE = 1 if IS_ON_CPU else 4
"""How many times longer than on the CPU an engine may take: kernels are compiled at first use."""

on_the_cpu = pytest.mark.skipif(not IS_ON_CPU, reason="of engines on the CPU")


def load_reference(folder: Path) -> LlamaForCausalLM:
    """What a model computes whose weights have gone through the dtype, but little else has."""
    return rounded(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@torch.no_grad()
def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """A model in float32, its weights rounded to the dtype in place."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(DTYPE))
    return model


def is_near(found: Sequence[float] | Tensor, expected: Tensor, *, exact: float = 1e-5) -> bool:
    """Whether logprobs are those; exact: how near each is in float32."""
    gaps = (torch.as_tensor(found) - expected).abs()
    if IS_EXACT:
        return bool((gaps <= exact).all())
    return bool(gaps.mean() <= MEAN and gaps.max() <= MOST)


def assert_near(found: Sequence[float] | Tensor, expected: Tensor, *, exact: float = 1e-5) -> None:
    gaps = (torch.as_tensor(found) - expected).abs()
    assert is_near(found, expected, exact=exact), (float(gaps.mean()), float(gaps.max()))
