"""Overlap of what tensor ranks exchange with their products (`expert.parallel.overlap_tensor`), two
GPUs.

Each test is a row of docs/gpu-evidence.md.
"""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.backend.tensor_overlap import buffers
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.files import load_config
from megatron_rl.plan.padding import overlap_buffer_bytes
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from tests.distributed import run_ranks
from tests.tiny_models import QWEN3_MOE, write_model

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_ENGINE, reason="TransformerEngine is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LIMIT_S = 300
STEPS = 8
VOCAB = 512
POSITIONS = 8192
SIZES = {"vocab_size": VOCAB, "hidden_size": 2048, "intermediate_size": 8192,
         "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192,
         "initializer_range": 0.02}  # fmt: skip
COMMON = ["parallel.tensor=2", "parallel.sequence=true", "optimizer.lr=1e-4",
          "optimizer.warmup_steps=0", f"train.microbatch_tokens={POSITIONS}",
          f"generator.context_tokens={POSITIONS}"]  # fmt: skip
PADDED = ["expert.train.pad_microbatches=true"]
OVERLAPPED = [*PADDED, "expert.parallel.overlap_tensor=true"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("dense", "mixture")}
    write_model(made["dense"], **SIZES)
    experts = {**QWEN3_MOE, "moe_intermediate_size": 1024, "head_dim": 128}
    write_model(made["mixture"], family="Qwen3Moe", **{**SIZES, **experts})
    return made


def make_share() -> MinibatchShare:
    """Two microbatches of different lengths, the second far from full."""
    rng = np.random.default_rng(0)

    def sequence(length: int) -> TrainSequence:
        return TrainSequence(
            token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
            prompt_length=8,
            generator_logprobs=np.zeros(length - 8, np.float32),
            version_runs=[(0, length - 8)],
            advantage=0.0,
            weight=1e-4,
        )

    return MinibatchShare([[sequence(n) for n in (4000, 2500, 1000)], [sequence(3001)]])


def train(overrides: list[str]) -> tuple[list[float], float, float]:
    """Losses of some steps, seconds of a later one, and the mean logprob before them."""
    cfg = load_config(None, [*COMMON, *overrides])
    share = make_share()
    with open_policy(cfg) as policy:
        objective = find_objective(AlgorithmConfig(preset="sft"))
        trainer = Trainer(policy, objective, cfg.optimizer, STEPS, train=cfg.train)
        # Without gradients the layers overlap less than in an update, by the same buffers.
        before = float(torch.cat(trainer.logprobs(share)).mean())
        losses, seconds = [], []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            began = time.monotonic()
            metrics = trainer.update(share, version=0)
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
            losses.append(next(m.value for m in metrics if m.name == "train/loss"))
    return losses, statistics.median(seconds[3:]), before


def knows_multicast() -> bool:
    return importlib.import_module("transformer_engine_torch").device_supports_multicast()


def environment() -> dict[str, str]:
    """TransformerEngine's own switch for hosts without CUDA multicast."""
    return {} if run_ranks(knows_multicast, 1, timeout_s=LIMIT_S)[0] else {"UB_SKIPMC": "1"}


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    ("kind", "recipe", "limit"),
    [
        ("dense", "model.fp8=none", 1e-2),
        ("dense", "model.recompute=full", 1e-2),
        ("mixture", "model.fp8=none", 1e-2),
        ("dense", "model.fp8=tensorwise expert.model.fp8_bf16_edge_layers=1", 5e-2),
        ("dense", "model.fp8=delayed", 5e-2),
    ],
)
def test_overlapped_ranks_learn_like_others(
    folders: dict[str, Path],
    kind: str,
    recipe: str,
    limit: float,
    record_property: Callable[[str, object], None],
) -> None:
    given, env = [f"model.path={folders[kind]}", *recipe.split()], environment()
    plain, padded, overlapped = (
        run_ranks(train, 2, [*given, *overrides], timeout_s=LIMIT_S, env=env)[0]
        for overrides in ([], PADDED, OVERLAPPED)
    )
    times = ", ".join(f"{found[1] * 1e3:.1f} ms" for found in (plain, padded, overlapped))
    print(f"{kind}, {recipe}: a step plain, padded, overlapped: {times}")
    record_property("figure", f"{recipe}: a step plain, padded, overlapped: {times}")
    for found in (padded, overlapped):
        assert found[0] == pytest.approx(plain[0], rel=limit)
        assert found[2] == pytest.approx(plain[2], rel=limit)
    assert overlapped[0][-1] < overlapped[0][0]


def memory_of_buffers(folder: str) -> tuple[int, int, int]:
    """Bytes of the device taken by the buffers, still taken after them, and as `plan` has them."""
    given = [*COMMON, f"model.path={folder}"]
    overlapped = load_config(None, [*given, *OVERLAPPED])
    with open_policy(load_config(None, given)) as policy:
        hidden = policy.shape.hidden
        free = [torch.cuda.mem_get_info()[0]]
        with buffers(overlapped, hidden, POSITIONS):
            free.append(torch.cuda.mem_get_info()[0])
        free.append(torch.cuda.mem_get_info()[0])
    expected = overlap_buffer_bytes(overlapped.model, overlapped.parallel, POSITIONS) * hidden
    return free[0] - free[1], free[0] - free[2], expected


def test_buffers_take_what_the_plan_says_and_are_given_back(
    folders: dict[str, Path], record_property: Callable[[str, object], None]
) -> None:
    [(taken, left, expected), _] = run_ranks(
        memory_of_buffers, 2, str(folders["dense"]), timeout_s=LIMIT_S, env=environment()
    )
    record_property("figure", f"{taken / 2**20:.0f} MiB, {left / 2**20:.0f} MiB stay")
    # Flags, and allocations in whole pages of the device.
    allowance = 128 * 2**20
    assert expected <= taken <= expected + allowance
    assert left <= allowance
