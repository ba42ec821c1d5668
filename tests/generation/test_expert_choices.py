"""SGLang returns the experts of every token: those that transformers' routers choose, but where
bfloat16 makes two of them equal (`precision.py`)."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generation.engine import Completion, EngineSetup
from generation.sglang_engine import SGLangEngine
from megatron_rl.protocol.types import Sampling
from tests.generation.engine_driver import LIMIT_S
from tests.generation.precision import DTYPE_NAME, IS_EXACT, rounded
from tests.ports import free_port
from tests.tiny_models import CORRECTION, GLM4_MOE, GPT_OSS, LATENT, QWEN3_MOE, write_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
LAYERS, TOPK = 4, 2
ROUNDING = 0.1
"""Of a router's score in bfloat16; scores have a standard deviation of about 1."""
PROMPT = [5, 6, 7, 8, 9, 10, 11]
GLM_TOPK = {"num_experts_per_tok": TOPK}
# Without groups; and the keys of published folders that SGLang needs.
PUBLISHED = {**GLM_TOPK, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
             "scoring_func": "sigmoid", "moe_layer_freq": 1}  # fmt: skip


async def generate(setup: EngineSetup) -> tuple[list[Completion], list[int], Completion]:
    """Two completions of the prompt; and a turn behind the first, with its prompt.

    The turn asks for choices from the last token of the first completion on.
    """
    engine = SGLangEngine(setup)
    try:
        await engine.start()
        async with aclosing(engine.generate(PROMPT, Sampling(6, 1.0), [0, 1])) as answers:
            completions = [completion async for completion in answers]
        known = [*PROMPT, *completions[0].token_ids]
        prompt = [*known, 12, 13, 14]
        asked = Sampling(5, 1.0, choices_from=len(known) - 1)
        async with aclosing(engine.generate(prompt, asked, [0])) as answers:
            return completions, prompt, await anext(answers)
    finally:
        await engine.close()


def scores_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, layers with experts, experts]: by what the model's routers choose."""
    with torch.no_grad():
        logits = torch.stack(model(ids, output_router_logits=True).router_logits, dim=1)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION)]
    return logits.sigmoid() + torch.stack(corrections) if corrections else logits


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3Moe", QWEN3_MOE),
        ("Glm4Moe", {**GLM4_MOE, **GLM_TOPK}),
        ("DeepseekV3", {**LATENT, **PUBLISHED}),
        ("GptOss", {**GPT_OSS, "num_experts_per_tok": TOPK}),
    ],
)
def test_the_engines_choices_are_those_of_the_model(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = rounded(write_model(tmp_path / "model", family=family, **options))
    dense = options.get("first_k_dense_replace", 0)
    setup = EngineSetup(
        model=tmp_path / "model", dtype=DTYPE_NAME, stop_ids=(), tensor_parallel=1, max_running=8,
        kv_tokens=1024, context_tokens=64, nice=0, start_timeout_s=200, request_timeout_s=LIMIT_S,
        weights_timeout_s=30, host="127.0.0.1", port=free_port(), seed=0, version=0,
        log_path=tmp_path / "sglang.log", returns_expert_choices=True,
    )  # fmt: skip
    completions, prompt, turn = asyncio.run(generate(setup))
    assert len(completions) == 2
    # The engine had the first completion in its prefix cache.
    begin = len(PROMPT) + len(completions[0].token_ids) - 1
    told = [*((PROMPT, completion, 0) for completion in completions), (prompt, turn, begin)]
    for asked, completion, skipped in told:
        ids = torch.tensor([asked + completion.token_ids])
        scores = scores_of(model, ids)[skipped:-1]
        found = np.frombuffer(completion.expert_choices, np.int32).reshape(-1, LAYERS, TOPK)
        # Dense layers have a place too, which no router reads.
        found = found[:, dense:]
        assert found.shape == (*scores.shape[:2], TOPK)
        assert all(len(set(chosen)) == TOPK for chosen in found.reshape(-1, TOPK).tolist())
        chosen = scores.gather(2, torch.from_numpy(found.astype(np.int64)))
        missed = scores.topk(TOPK).values[..., -1] - chosen.amin(2)
        assert missed.max() <= (0.0 if IS_EXACT else ROUNDING)
