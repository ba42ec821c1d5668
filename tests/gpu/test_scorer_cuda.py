"""A frozen SGLang in bf16 on CUDA: logprobs of given tokens, a row of docs/gpu-evidence.md."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from generation.scoring_engine import ScoringEngine, scoring_setup, vocabulary
from megatron_rl.config.files import load_config
from megatron_rl.launcher.ports import find_free

LIMIT_S = 500
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]
VOCAB, CONTEXT = 512, 256
BF16_TOLERANCE = 0.05
"""Of the mean difference of logprobs, as that of generators."""


def write_model(folder: Path, seed: int, vocab: int, hidden: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def test_a_teacher_in_bf16_scores_near_transformers(tmp_path: Path) -> None:
    policy, teacher = tmp_path / "policy", tmp_path / "teacher"
    write_model(policy, 5, VOCAB, 128)
    write_model(teacher, 6, VOCAB + 8, 256)
    config = load_config(
        None,
        [
            f"model.path={policy}", f"run.dir={tmp_path}", "model.dtype=bfloat16",
            f"algorithm.reference.policy={teacher}", "algorithm.reference.source=engine",
            f"generator.context_tokens={CONTEXT}", "sampling.max_new_tokens=128",
            "reward.length_margin_tokens=0", "expert.scorer.start_timeout_s=300",
            f"expert.ports.scorer={find_free('127.0.0.1', 3)}",
        ],
    )  # fmt: skip
    sequences = [torch.randint(0, VOCAB, (n,)).tolist() for n in (2, 17, 90, CONTEXT)]
    starts = [1, 5, 40, 100]

    async def score() -> list[list[float]]:
        engine = ScoringEngine(scoring_setup(config), vocabulary(config))
        try:
            await engine.start()
            work = map(engine.logprobs, sequences, starts)
            return await asyncio.wait_for(asyncio.gather(*work), LIMIT_S)
        finally:
            await engine.close()

    found = torch.tensor([value for each in asyncio.run(score()) for value in each])
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    expected = []
    for ids, start in zip(sequences, starts, strict=True):
        rows = model(torch.tensor([ids])).logits[0, :-1, :VOCAB].detach().log_softmax(-1)
        expected.append(rows.gather(1, torch.tensor(ids)[1:, None])[start - 1 :, 0])
    whole = torch.cat(expected)
    assert (found - whole).abs().mean() < BF16_TOLERANCE
    # The tokens are told apart by more than the rounding.
    assert whole.std() > 4 * BF16_TOLERANCE
