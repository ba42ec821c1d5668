"""The figures of the training benchmark on samples written by hand; its peers' microbatches."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from megatron_rl.config.gpus import find_gpu
from megatron_rl.config.tree import OptimizerConfig
from megatron_rl.plan.trainer_memory import fullest_rank
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import write_model
from tools.bench import train
from tools.bench.children import ROOT
from tools.bench.packing import Lengths, magistral_like
from tools.bench.train import (
    GPU,
    PEERS,
    PRECISIONS,
    Measured,
    Sample,
    check_losses,
    compare,
    make_config,
    mfu,
    over_gemm,
    scaling,
    step_flops,
)
from tools.bench.train_peer import IGNORED, PlainLoop, pack, pad


def make_samples(seconds: dict[str, list[float]]) -> list[Sample]:
    return [
        Sample(loop, value, value / 2, 100) for loop, values in seconds.items() for value in values
    ]


def test_ratios_are_medians_of_steps_beside_each_other() -> None:
    times = {
        "ours": [1.0, 2.0, 4.0],
        "padded_peer": [2.0, 3.0, 20.0],
        "packed_peer": [0.5, 2.0, 8.0],
    }
    losses = {"ours": 1.0, "padded_peer": 1.25, "packed_peer": 1.0}
    found = compare(Measured(make_samples(times), "cpu", 1.0, losses, 0.7))
    # 2, 1.5 and 5; then 0.5, 1 and 2.
    assert found["ours_over_padded_peer"] == found["ours_over_padded_peer_cpu"] == 2.0
    assert found["ours_over_packed_peer"] == 1.0
    assert found["tokens_per_s_ours"] == 50.0
    assert found["loss_difference"] == 0.25
    assert found["logprob_peak_bytes_over_bound"] == 0.7


def test_reached_share_is_of_the_median_step() -> None:
    samples = make_samples({"ours": [1.0, 2.0, 9.0]})
    # 60 FLOP in 2 s, where products alone do 100 a second.
    assert over_gemm(Measured(samples, "cpu", 60.0, gemm_rate=100.0)) == pytest.approx(0.3)


def test_scaling_compares_two_ranks_to_one() -> None:
    def measured(seconds: float) -> Measured:
        return Measured(make_samples({"ours": [seconds] * 3}), "cpu", 1.0)

    rounds = [
        {"one": measured(one), "tp2": measured(2.0), "dp2": measured(1.0)} for one in (2, 3, 4)
    ]
    assert scaling(rounds) == {"scaling_tp2": 1.5, "scaling_dp2": 3.0}


def test_utilisation_needs_a_device_with_a_known_peak() -> None:
    samples = make_samples({"ours": [2.0]})
    assert mfu(Measured(samples, "NVIDIA H100 80GB HBM3", 989e12), "bf16") == 0.5
    assert mfu(Measured(samples, "cpu", 989e12), "bf16") is None


def test_utilisation_is_measured_in_bf16_and_in_fp8(tmp_path: Path) -> None:
    models = {
        name: make_config(tmp_path / name, tmp_path, GPU, model=settings).model
        for name, settings in PRECISIONS.items()
    }
    assert {name: model.dtype for name, model in models.items()} == dict.fromkeys(
        ("bf16", "fp8"), "bfloat16"
    )
    assert (models["bf16"].fp8, models["fp8"].fp8) == ("none", "tensorwise")


def test_ranks_on_a_gpu_see_it_and_have_the_settings_of_a_runs_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []

    def run_ranks(*_: object, environment: dict[str, str], **__: object) -> Measured:
        environments.append(environment)
        return Measured(make_samples({"ours": [2.0]}), "NVIDIA H100 80GB HBM3", 989e12)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(train, "write_model", lambda folder, sizes: None)
    monkeypatch.setattr(train, "run_ranks", run_ranks)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert train.on_gpu(tmp_path)["mfu_bf16"] == 0.5
    for found in environments:
        assert not {"CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE", "MKL_NUM_THREADS"} & found.keys()
        assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert found["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
        assert found["PYTHONPATH"].startswith(str(ROOT))


def test_the_model_of_a_gpu_fits_one_of_80_gb(tmp_path: Path) -> None:
    longest = max(s.total for s in magistral_like(GPU.work.sequences, seed=1, scale=GPU.work.scale))
    assert longest <= GPU.microbatch_tokens
    LlamaConfig(**GPU.model, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    cfg = make_config(tmp_path / "run", tmp_path, GPU, model=PRECISIONS["bf16"])
    memory = fullest_rank(read_shape(tmp_path), cfg, longest)
    assert memory.total < 0.8 * find_gpu("h100-80g").memory_bytes


def test_flops_of_a_step_match_a_count_by_hand(tmp_path: Path) -> None:
    write_model(tmp_path, hidden_size=8, intermediate_size=16, num_hidden_layers=2, vocab_size=10)
    shape = read_shape(tmp_path)
    # A layer of 4 heads of 2 with 2 of keys and values: 8 x (8 + 4 + 4 + 8) of attention and
    # 3 x 8 x 16 of the feed-forward part.
    layers = 2 * (8 * 24 + 3 * 8 * 16)
    sequences = [Lengths(3, 5), Lengths(1, 2)]
    # 8 x 9 / 2 and 3 x 4 / 2 pairs of tokens, products of queries and of values.
    attention = 2 * 4 * 8 * (36 + 6)
    expected = 3 * (2 * layers * 11 + 2 * 10 * 8 * 7 + attention)
    assert step_flops(shape, sequences) == expected


def make_sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    lengths = [(3, 9), (2, 4), (5, 17), (1, 1), (4, 8), (2, 2), (3, 3), (2, 30), (6, 5), (1, 7)]
    total = sum(completion for _, completion in lengths)
    return [
        TrainSequence(
            rng.integers(0, 250, prompt + completion).astype(np.int32),
            prompt,
            np.zeros(completion, np.float32),
            [(0, completion)],
            0.0,
            1 / total,
        )
        for prompt, completion in lengths
    ]


def test_all_peers_compute_the_mean_over_completion_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    loop = PlainLoop(tmp_path, torch.device("cpu"), OptimizerConfig(), 40)
    sequences = make_sequences()
    expected = torch.zeros(())
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids).long()
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
        chosen = logprobs.gather(1, ids[1:, None])[sequence.prompt_length - 1 :]
        expected -= chosen.sum() * sequence.weight
    for peer in PEERS:
        assert loop.accumulate(sequences, peer) == pytest.approx(expected.item(), rel=1e-5), peer


def test_labels_are_completion_tokens() -> None:
    first, second = make_sequences()[1:3]
    inputs, labels = pad([first, second])
    assert inputs["attention_mask"].sum(1).tolist() == [6, 22]
    assert (labels != IGNORED).sum(1).tolist() == [4, 17]
    inputs, labels = pack([first, second])
    assert inputs["position_ids"].tolist() == [[*range(6), *range(22)]]
    assert (labels != IGNORED).sum().item() == 21


def test_loops_that_start_at_other_losses_are_not_timed() -> None:
    check_losses({"ours": 10.4984312, "padded_peer": 10.4984304})
    for other in (10.4978, float("nan")):
        with pytest.raises(RuntimeError, match="different losses"):
            check_losses({"ours": 10.4984312, "padded_peer": other})
