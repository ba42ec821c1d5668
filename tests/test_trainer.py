"""The gradient is the same for every packing, microbatch budget and parallel split (fp32).

Gradients are compared in Hugging Face layout: they are put in the parameters' place and go through
the weight export. The reference is transformers' own model with an obvious per-sequence loss.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_rl.loss import LOSSES, LossInputs, clipped_loss
from megatron_rl.policy import open_policy
from megatron_rl.protocol.config import Config
from megatron_rl.protocol.config_file import load_config
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer import Objective, Trainer
from megatron_rl.weights.export import export_tensors
from tests.distributed import run_ranks

VOCAB = 200


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(11)
    lengths = [(5, 9), (3, 4), (7, 1), (4, 20), (6, 2), (2, 13), (5, 5), (3, 8), (1, 3)]
    total = sum(completion for _, completion in lengths)
    return [
        TrainSequence(
            token_ids=rng.integers(0, VOCAB, prompt + completion).astype(np.int32),
            prompt_length=prompt,
            generator_logprobs=rng.normal(-5, 0.3, completion).astype(np.float32),
            token_versions=np.zeros(completion, np.int32),
            advantage=float(rng.normal()),
            weight=1 / total,
        )
        for prompt, completion in lengths
    ]


def gradient_of(cfg: Config, budget_tokens: int) -> dict[str, torch.Tensor]:
    """Gradient in HF layout (rank 0) after forward and backward of the same minibatch."""
    sequences = make_sequences()
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, Objective(LOSSES["clipped"], cfg.loss), cfg.optimizer, 1)
        dp_size = parallel_state.get_data_parallel_world_size()
        lengths = [len(sequence.token_ids) for sequence in sequences]
        dealt = deal(lengths, budget_tokens=budget_tokens, dp_size=dp_size)
        mine = dealt[parallel_state.get_data_parallel_rank()]
        share = MinibatchShare([[sequences[i] for i in microbatch] for microbatch in mine])
        sums = trainer.accumulate(share, version=0)
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.copy_(parameter.main_grad)
        gradient = {
            name: tensor.clone() for name, tensor in export_tensors(policy.chunks, policy.shape)
        }
        return {**gradient, "loss": torch.tensor(sums["loss"])}


def reference_gradient(folder: Path) -> dict[str, torch.Tensor]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = torch.zeros(())
    for s in make_sequences():
        ids = torch.tensor(s.token_ids, dtype=torch.int64)
        rows = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        logprobs = torch.stack([rows[i - 1, ids[i]] for i in range(s.prompt_length, len(ids))])
        ones = torch.ones(len(logprobs))
        inputs = LossInputs(
            logprobs, torch.tensor(s.generator_logprobs), ones * s.advantage, ones * s.weight
        )
        total = total + clipped_loss(inputs, load_config(None).loss).loss
    total.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradient, "loss": total.detach()}


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "budget_tokens", "extra"),
    [
        (1, 1, 1, 1000, []),
        (1, 1, 1, 1, []),
        (1, 1, 1, 25, []),
        (2, 1, 1, 30, []),
        (2, 1, 1, 30, ["parallel.sequence=true"]),
        (1, 2, 1, 30, []),
        (1, 1, 2, 30, []),
        (2, 2, 1, 25, []),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else str(value),
)
def test_gradient_is_equal_for_every_split(
    model_folder: Path, tensor: int, pipeline: int, data: int, budget_tokens: int, extra: list[str]
) -> None:
    cfg = load_config(
        None,
        [
            f"model.path={model_folder}",
            "model.dtype=float32",
            f"parallel.tensor={tensor}",
            f"parallel.pipeline={pipeline}",
            f"parallel.data={data}",
            *extra,
        ],
    )
    result = run_ranks(gradient_of, cfg.parallel.world_size, cfg, budget_tokens)[0]
    expected = reference_gradient(model_folder)
    expected.pop("lm_head.weight", None)
    assert set(result) == set(expected)
    for name, gradient in expected.items():
        error = (result[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"
