"""Families on CUDA: TransformerEngine's layers compute what transformers does.

Each test is a row of docs/gpu-evidence.md. One GPU is enough.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.files import load_config
from megatron_rl.launcher.audit_model import hf_logits
from megatron_rl.trainer.model.build import packed
from megatron_rl.trainer.model.policy import open_policy
from tests.distributed import run_ranks
from tests.tiny_models import (
    GLM4_MOE,
    GPT_OSS,
    LATENT,
    MINISTRAL3,
    MIXED_WINDOWS,
    OLMO3,
    write_model,
)
from tests.wrapped_models import write_wrapped

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_ENGINE, reason="TransformerEngine is not installed"),
]
IDS = [number * 7 % 250 for number in range(96)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
ROUNDING = 3
"""Another order of sums, and tokens whose experts have nearly equal scores."""


def distances(folder: Path) -> tuple[float, float]:
    """Mean distance to transformers' logits in float32: of ours in bf16, and of its own in bf16."""
    cfg = load_config(None, [f"model.path={folder}", "model.dtype=bfloat16"])
    with open_policy(cfg) as policy:
        device = policy.device
        ids, positions = (torch.tensor([row], device=device) for row in (IDS, list(range(96))))
        chunk = policy.chunks[0].eval()
        with torch.no_grad():
            logits = chunk(ids, positions, None, packed_seq_params=packed([96], device))
        ours = logits[0, :, : policy.shape.vocab].float().cpu()
    expected, theirs = (hf_logits(folder, [IDS], dtype) for dtype in ("float32", "bfloat16"))
    return float((ours - expected).abs().mean()), float((theirs - expected).abs().mean())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"rope_parameters": YARN}),
        ("Glm4Moe", GLM4_MOE),
        ("DeepseekV3", LATENT),
        ("GptOss", GPT_OSS),
        ("Mistral3", {}),
        ("Ministral3", MINISTRAL3),
        ("Olmo3", OLMO3),
        ("Phi3", {"sliding_window": 24}),
        ("SmolLM3", MIXED_WINDOWS),
    ],
)
def test_engine_layers_compute_what_transformers_does(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if family == "Mistral3":
        write_wrapped(tmp_path, family, **options)
    else:
        write_model(tmp_path, family=family, **options)
    [(ours, theirs)] = run_ranks(distances, 1, tmp_path, timeout_s=300)
    assert 0 < ours <= ROUNDING * theirs
