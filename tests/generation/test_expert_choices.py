"""SGLang returns the experts of every token: those that transformers' routers choose."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from generation.engine import Completion, EngineSetup
from generation.sglang_engine import SGLangEngine
from megatron_rl.protocol.types import Sampling
from tests.ports import free_port
from tests.tiny_models import QWEN3_MOE, write_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
LAYERS, TOPK = 4, 2
PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def generate(setup: EngineSetup) -> list[Completion]:
    """Two completions of the prompt."""
    engine = SGLangEngine(setup)
    try:
        await engine.start()
        async with aclosing(engine.generate(PROMPT, Sampling(6, 1.0), [0, 1])) as answers:
            return [completion async for completion in answers]
    finally:
        await engine.close()


def test_the_engines_choices_are_those_of_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family="Qwen3Moe", **QWEN3_MOE)
    setup = EngineSetup(
        model=tmp_path / "model", dtype="float32", stop_ids=(), tensor_parallel=1, max_running=8,
        kv_tokens=1024, context_tokens=64, nice=0, start_timeout_s=200, request_timeout_s=60,
        weights_timeout_s=30, host="127.0.0.1", port=free_port(), seed=0, version=0,
        log_path=tmp_path / "sglang.log", returns_expert_choices=True,
    )  # fmt: skip
    completions = asyncio.run(generate(setup))
    assert len(completions) == 2
    for completion in completions:
        ids = torch.tensor([PROMPT + completion.token_ids])
        with torch.no_grad():
            scores = model(ids, output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(TOPK).indices for layer in scores], dim=1)[:-1]
        found = np.frombuffer(completion.expert_choices, np.int32).reshape(-1, LAYERS, TOPK)
        assert found.shape == expected.shape
        assert (np.sort(found) == expected.sort().values.numpy()).all()
