"""Where slices say that weights lie in SGLang, against the parameters of real servers."""

import asyncio
import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from generation import sglang_engine
from generation.engine import Completion
from generation.sglang_engine import SGLangEngine
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.protocol.types import Sampling
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.trainer_layout import untrained
from tests.generation import layout_loader
from tests.generation.engine_driver import make_setup
from tests.generation.layout_models import write_model
from tests.generation.tiny_model import logprobs

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 6, 7, 8, 9, 10, 250]
TOLERANCE = 1e-5
LIMIT_S = 150

CASES = [
    pytest.param(*case, id=name)
    for name, *case in [
        ("llama-tied-tp2", "Llama", True, ["--tp-size=2"]),
        ("llama-tp1", "Llama", False, ["--tp-size=1"]),
        ("qwen2-tied-tp2", "Qwen2", True, ["--tp-size=2"]),
        ("qwen3-tied-tp1", "Qwen3", True, ["--tp-size=1"]),
        ("qwen3-tp2", "Qwen3", False, ["--tp-size=2"]),
        ("smollm3-tp1", "SmolLM3", True, ["--tp-size=1"]),
        ("smollm3-tp2", "SmolLM3", False, ["--tp-size=2"]),
        ("phi3-tp1", "Phi3", True, ["--tp-size=1"]),
        ("phi3-tp2", "Phi3", False, ["--tp-size=2"]),
        ("mistral-window-tp1", "Mistral", False, ["--tp-size=1"]),
        ("mixtral-tp2", "Mixtral", False, ["--tp-size=2"]),
        ("moe-tp1", "Qwen3Moe", False, ["--tp-size=1"]),
        ("moe-tp2", "Qwen3Moe", False, ["--tp-size=2"]),
        ("glm-tp1", "Glm4Moe", False, ["--tp-size=1"]),
        ("glm-tp2", "Glm4Moe", False, ["--tp-size=2"]),
        ("glm-lite-tp1", "Glm4MoeLite", False, ["--tp-size=1"]),
        ("glm-lite-tp2", "Glm4MoeLite", False, ["--tp-size=2"]),
        ("olmo2-tp1", "Olmo2", True, ["--tp-size=1"]),
        ("olmo2-tp2", "Olmo2", False, ["--tp-size=2"]),
        ("olmo3-tp2", "Olmo3", True, ["--tp-size=2"]),
        ("ministral3-tp2", "Ministral3", True, ["--tp-size=2"]),
        ("gpt-oss-tp1", "GptOss", False, ["--tp-size=1"]),
        ("gpt-oss-tp2", "GptOss", False, ["--tp-size=2"]),
        ("deepseek-tp1", "DeepseekV3", False, ["--tp-size=1"]),
        ("deepseek-tp2", "DeepseekV3", False, ["--tp-size=2"]),
    ]
]


# Exchanges with servers, in the default tests, use the same slices.
@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(("family", "is_tied", "flags"), CASES)
def test_slices_read_and_write_what_a_server_holds(
    family: str, is_tied: bool, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    old, new = (
        write_model(tmp_path / name, family=family, is_tied=is_tied, seed=seed)
        for seed, name in enumerate(("old", "new"))
    )
    ranks = int(flags[0].removeprefix("--tp-size="))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(layout_loader.OLD, str(tmp_path / "old"))
    monkeypatch.setenv(layout_loader.NEW, str(tmp_path / "new"))
    monkeypatch.setenv(layout_loader.REPORTS, str(tmp_path))
    command = sglang_engine.server_command
    monkeypatch.setattr(
        sglang_engine,
        "server_command",
        lambda *given: [*command(*given), *flags, f"--custom-weight-loader={layout_loader.NAME}"],
    )
    setup = make_setup(tmp_path, tmp_path / "server.log", tensor_parallel=ranks, context_tokens=200)
    before, after = asyncio.run(
        asyncio.wait_for(exchange(SGLangEngine(setup), ranks), timeout=LIMIT_S)
    )
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for report in reports:
        assert "error" not in report, report["error"]
        assert report["different"] == []
    # Every rank holds a part of each tensor that is trained.
    kept = sorted(untrained(read_shape(tmp_path / "old")))
    assert [report["unused"] for report in reports] == [kept] * ranks
    for model, completions in ((old, before), (new, after)):
        for completion in completions:
            expected = logprobs(model, PROMPT, completion.token_ids)
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_slices_of_divided_experts_are_what_a_server_holds(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters alone: SGLang's CPU mode cannot compute with divided experts."""
    for seed, name in enumerate(("old", "new")):
        write_model(tmp_path / name, family=family, is_tied=False, seed=seed)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(layout_loader.OLD, str(tmp_path / "old"))
    monkeypatch.setenv(layout_loader.NEW, str(tmp_path / "new"))
    monkeypatch.setenv(layout_loader.REPORTS, str(tmp_path))
    monkeypatch.setattr(SGLangEngine, "loader", layout_loader.NAME)
    # By itself /health samples a token.
    monkeypatch.setenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    setup = make_setup(
        tmp_path, tmp_path / "server.log", tensor_parallel=2, expert_parallel=2, context_tokens=200
    )
    asyncio.run(asyncio.wait_for(_load_only(SGLangEngine(setup)), timeout=LIMIT_S))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        assert "error" not in report, report["error"]
        assert report["different"] == []
        experts = {int(name.split(".experts.")[1].split(".")[0])
                   for name in report["unused"] if ".experts." in name}  # fmt: skip
        # Of four experts rank 0 holds the first two, rank 1 the others; nothing else is missing.
        assert experts == ({2, 3}, {0, 1})[rank]
        assert all(".experts." in name for name in report["unused"])


async def _load_only(engine: SGLangEngine) -> None:
    try:
        await engine.start()
        await engine.pause()
        await engine._post("/update_weights_from_tensor", _loader_call(2))
    finally:
        await engine.close()


@pytest.mark.exhaustive
def test_ranks_beyond_the_key_value_heads_share_them_as_sglangs_layer_does() -> None:
    environment = {**os.environ, **sglang_cpu.server_environment(1)}
    environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.qkv_layer"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str((1 + 2 + 4 + 8) * 6)]


async def exchange(engine: SGLangEngine, ranks: int) -> tuple[list[Completion], list[Completion]]:
    """Completions of the server's weights before and after the loader ran in it."""
    try:
        await engine.start()
        before = await _collect(engine)
        await engine.pause()
        await engine._post("/update_weights_from_tensor", _loader_call(ranks))
        await engine.resume(1)
        return before, await _collect(engine)
    finally:
        await engine.close()


async def _collect(engine: SGLangEngine) -> list[Completion]:
    sampling = Sampling(max_new_tokens=32, temperature=1.0, top_p=1.0, seed=0)
    return [one async for one in engine.generate(PROMPT, sampling, list(range(4)))]


def _loader_call(ranks: int) -> dict[str, Any]:
    """Body that makes every tensor rank call the loader, with no tensors."""
    nothing = base64.b64encode(pickle.dumps([])).decode()
    return {
        "serialized_named_tensors": [nothing] * ranks,
        "load_format": layout_loader.NAME,
        "weight_version": "1",
        "flush_cache": False,
    }
