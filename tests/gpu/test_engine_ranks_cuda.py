"""Engines of several ranks on CUDA: experts divided among them, ranks on several nodes.

Each test is a row of docs/gpu-evidence.md, and takes two GPUs.
"""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generation import follower
from generation.engine import EngineSetup
from generation.meeting import call_path
from generation.sglang_command import server_environment
from generation.sglang_engine import SGLangEngine
from generation.sglang_nodes import SpreadSGLangEngine
from tests.generation import layout_loader
from tests.generation.layout_models import write_model
from tests.generation.test_engine_contract import make_setup
from tests.generation.test_sglang_layout import PROMPT, ROOT, exchange
from tests.generation.tiny_model import logprobs
from tests.ports import free_port

LIMIT_S = 500
BF16_TOLERANCE = 0.05
"""Of the mean difference of logprobs."""
SIZES = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.nn.Module]:
    """Two mixtures in bf16; the loader of the test reads the one and writes the other."""
    found = {}
    for seed, name in enumerate(("old", "new")):
        model = write_model(
            tmp_path / name, family="Qwen3Moe", is_tied=False, seed=seed, **SIZES
        ).bfloat16()
        model.save_pretrained(tmp_path / name)
        found[name] = model
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv(layout_loader.OLD, str(tmp_path / "old"))
    monkeypatch.setenv(layout_loader.NEW, str(tmp_path / "new"))
    monkeypatch.setenv(layout_loader.REPORTS, str(tmp_path))
    monkeypatch.setattr(SGLangEngine, "loader", layout_loader.NAME)
    return found


def setup_of(folder: Path, **changes: int) -> EngineSetup:
    return make_setup(
        folder, folder / "server.log", dtype="bfloat16", tensor_parallel=2, context_tokens=200,
        start_timeout_s=300.0, **changes,
    )  # fmt: skip


def test_divided_experts_take_slices_and_sample_as_transformers_does(
    tmp_path: Path, models: dict[str, torch.nn.Module]
) -> None:
    engine = SGLangEngine(setup_of(tmp_path, expert_parallel=2))
    completions = asyncio.run(asyncio.wait_for(exchange(engine, 2), LIMIT_S))
    for rank, held in enumerate(({0, 1}, {2, 3})):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "error" not in report, report["error"]
        assert report["different"] == []
        missing = {int(name.split(".experts.")[1].split(".")[0]) for name in report["unused"]}
        assert missing == {0, 1, 2, 3} - held
    for model, found in zip(models.values(), completions, strict=True):
        gaps = [
            torch.tensor(one.logprobs) - logprobs(model, PROMPT, one.token_ids).float()
            for one in found
        ]
        assert torch.cat(gaps).abs().mean() < BF16_TOLERANCE


def test_two_nodes_of_a_gpu_each_take_slices_and_sample_as_transformers_does(
    tmp_path: Path, models: dict[str, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "LOADER", layout_loader.NAME)
    # Each node sees a GPU of its own, as on two hosts.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def on_the_second(setup: EngineSetup) -> dict[str, str]:
        return server_environment(setup) | {"CUDA_VISIBLE_DEVICES": "1"}

    monkeypatch.setattr(follower, "server_environment", on_the_second)
    setup, call = setup_of(tmp_path), call_path(tmp_path, 0)

    async def play() -> tuple:
        engine = SpreadSGLangEngine(setup, nodes=2, address="127.0.0.1", call=call)
        second = replace(setup, port=free_port())
        following = asyncio.ensure_future(follower.follow(second, call, 1, 2))
        try:
            return await exchange(engine, 2)
        finally:
            following.cancel()

    completions = asyncio.run(asyncio.wait_for(play(), LIMIT_S))
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "error" not in report, report["error"]
        assert report["different"] == [] and report["unused"] == []
    for model, found in zip(models.values(), completions, strict=True):
        gaps = [
            torch.tensor(one.logprobs) - logprobs(model, PROMPT, one.token_ids).float()
            for one in found
        ]
        assert torch.cat(gaps).abs().mean() < BF16_TOLERANCE
