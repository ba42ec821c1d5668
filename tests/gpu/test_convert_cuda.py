"""Converted folders on CUDA: TransformerEngine's layers load what the Hugging Face folder holds.

Each test is a row of docs/gpu-evidence.md. One GPU is enough.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.tree import ParallelConfig
from tests.distributed import run_ranks
from tests.tiny_models import GLM4_MOE, LATENT, QWEN3_MOE
from tests.weights.folders.test_load_megatron import differing, make_checkpoint

pytestmark = pytest.mark.gpu
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(not HAS_ENGINE, reason="TransformerEngine is not installed")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Qwen3Moe", QWEN3_MOE),
        ("Glm4Moe", GLM4_MOE),
        ("DeepseekV3", LATENT),
    ],
)
def test_engine_layers_load_a_converted_folder(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    hf, megatron = make_checkpoint(tmp_path, family, options)
    arguments = (hf, megatron, ParallelConfig(), "bfloat16")
    assert run_ranks(differing, 1, *arguments, timeout_s=300) == [[]]
