"""Syncing from a trainer rank to SGLang on CUDA: to engines in bf16 and in FP8.

Each test is a row of docs/gpu-evidence.md. The first GPU is the trainer rank's, the last one the
engine's; over NCCL these must be two.
"""

import asyncio
import base64
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from generation import sglang_engine
from generation.async_sockets import AsyncDealer
from generation.engine import Completion, engine_setup
from generation.sglang_engine import SGLangEngine
from generation.sglang_orders import LOADER
from generation.tasks import end_with_first
from generation.weight_client import WeightClient
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import Sampling
from tests.distributed import run_ranks
from tests.generation import layout_loader
from tests.generation.tiny_model import logprobs
from tests.ports import free_port

LIMIT_S = 500
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(LIMIT_S + 60),
]
takes_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
PROMPT = [5, 6, 7, 8, 9, 10, 250]
BF16_TOLERANCE = 0.05
FP8_TOLERANCE = 0.3
"""Of the mean difference of logprobs."""


def sync_changed(cfg: Config, export: Path) -> dict[str, float]:
    """On the trainer rank: change the weights, weight sync them as version 0, save them."""
    from megatron_rl.trainer.model.policy import open_policy
    from megatron_rl.trainer.train import open_control, open_syncer
    from megatron_rl.weights.folders.export import save_hf

    with (
        open_policy(cfg) as policy,
        open_syncer(cfg, policy, open_control(cfg, policy)) as weights,
    ):
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.mul_(1.125)
        weights.sync(0)
        save_hf(export, policy.chunks, policy.shape, source=cfg.model.path)
        return {metric.name: metric.value for metric in weights.metrics}


def make_config(folder: Path, quantization: str, method: str) -> Config:
    torch.manual_seed(5)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.05,
    }
    family, settings = (Qwen3ForCausalLM, Qwen3Config) if quantization else (
        LlamaForCausalLM, LlamaConfig,
    )  # fmt: skip
    family(settings(**sizes)).bfloat16().save_pretrained(folder / "model")
    (folder / "run" / "logs").mkdir(parents=True)
    return Config.model_validate(
        {
            "run": {"dir": folder / "run"},
            "model": {"path": folder / "model", "dtype": "bfloat16"},
            "generator": {
                "quantization": quantization,
                "kv_tokens": 8192,
                "start_timeout_s": 300.0,
            },
            "weights": {"method": method, "bucket_bytes": 1 << 20, "deadline_s": 60.0},
            "ports": {"weights": free_port(), "engine": free_port()},
        }
    )


async def sync_and_sample(
    engine: SGLangEngine, cfg: Config, export: Path
) -> tuple[dict[str, float], list[Completion]]:
    """Metrics of the weight sync, and what the engine samples of the new weights."""
    ranks = asyncio.to_thread(
        run_ranks, sync_changed, 1, cfg, export, timeout_s=200, env={"CUDA_VISIBLE_DEVICES": "0"}
    )
    address = f"{cfg.ports.host}:{cfg.ports.weights}"
    try:
        await engine.start()
        with AsyncDealer(address, "generator-0") as dealer:
            client = WeightClient(dealer, engine, lambda: None)
            [metrics] = await end_with_first(ranks, client.run())
        sampling = Sampling(max_new_tokens=32, temperature=1.0)
        found = [one async for one in engine.generate(PROMPT, sampling, list(range(8)))]
        await compare_parameters(engine, cfg)
        return metrics, found
    finally:
        await engine.close()


async def compare_parameters(engine: SGLangEngine, cfg: Config) -> None:
    """Have the test's loader compare what the engine holds with the export."""
    if cfg.generator.quantization:
        return
    nothing = base64.b64encode(pickle.dumps([])).decode()
    await engine.pause()
    body = {
        "serialized_named_tensors": [nothing],
        "load_format": layout_loader.NAME,
        "flush_cache": False,
    }
    await engine._post("/update_weights_from_tensor", body)
    await engine.resume(1)


def run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str = "",
    method: str = "reshard",
) -> tuple[dict[str, float], list[Completion], Path]:
    cfg, export = make_config(folder, quantization, method), folder / "export"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(torch.cuda.device_count() - 1))
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root), prepend=os.pathsep)
    for name in (layout_loader.OLD, layout_loader.NEW):
        monkeypatch.setenv(name, str(export))
    monkeypatch.setenv(layout_loader.REPORTS, str(folder))
    command = sglang_engine.server_command
    # The last of an option's values counts: both loaders.
    loaders = ["--custom-weight-loader", LOADER, layout_loader.NAME]
    monkeypatch.setattr(sglang_engine, "server_command", lambda *given: command(*given) + loaders)
    engine = SGLangEngine(engine_setup(cfg, 0, ()))
    work = asyncio.wait_for(sync_and_sample(engine, cfg, export), LIMIT_S)
    metrics, found = asyncio.run(work)
    return metrics, found, export


def differences(found: list[Completion], export: Path) -> torch.Tensor:
    """Of all sampled tokens: engine's logprob less that of transformers in bf16."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16).eval()
    return torch.cat(
        [
            torch.tensor(one.logprobs) - logprobs(model, PROMPT, one.token_ids).float()
            for one in found
        ]
    )


@takes_two
def test_slices_in_bf16_reach_sglang_over_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_slices(tmp_path, *run(tmp_path, monkeypatch))


def test_slices_in_bf16_reach_sglang_by_ipc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both on the first GPU.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_slices(tmp_path, *run(tmp_path, monkeypatch, method="ipc"))


def check_slices(
    folder: Path, metrics: dict[str, float], found: list[Completion], export: Path
) -> None:
    """They arrived bit for bit, and the engine samples from them."""
    assert metrics["weight_sync/damaged_parcels"] == 0 and metrics["weight_sync/transfer_s"] > 0
    report = json.loads((folder / "0.json").read_text())
    assert "error" not in report, report["error"]
    assert report["different"] == [] and report["unused"] == []
    assert {span.version for one in found for span in one.spans} == {0}
    assert differences(found, export).abs().mean() < BF16_TOLERANCE


@takes_two
def test_an_fp8_engine_quantises_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, export = run(tmp_path, monkeypatch, "fp8")
    assert differences(found, export).abs().mean() < FP8_TOLERANCE
