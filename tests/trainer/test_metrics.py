"""What the trainer writes down of a step."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.sequence_cost import SequenceCost
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.metrics import StepMetrics, SumsLayout, Utilisation, loss_metrics
from tests.distributed import run_ranks

VALUES = {
    "train/lr": 1e-9,
    "train/small": 1.23456789e-12,
    "train/third": 1 / 3,
    "train/bytes": 123_456_789_012.0,
    "train/zero": 0.0,
}


def write_steps(path: Path) -> None:
    dist.init_process_group("gloo")
    metrics = StepMetrics(path, "trainer")
    metrics.add(Metric(name, value) for name, value in VALUES.items())
    metrics.flush(3)
    dist.destroy_process_group()


def test_small_numbers_keep_their_digits(tmp_path: Path) -> None:
    run_ranks(write_steps, 1, tmp_path / "metrics.jsonl")
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    for name, value in VALUES.items():
        assert abs(row[name] - value) <= 1e-11 * value, name


def test_sums_become_shares_of_tokens() -> None:
    sums = {
        "loss": 0.5, "entropy": 6.0, "tokens": 4.0, "clip_fraction_low": 1.0,
        "clip_fraction_high": 2.0, "advantage": 2.0, "advantage_square": 5.0,
        "behaviour_ratio": 6.0, "behaviour_ratio_square": 12.0, "correction_changed": 1.0,
        "gold_logprob": -3.0, "gold_tokens": 2.0, "reference_k1": 2.0,
    }  # fmt: skip
    found = {metric.name: metric.value / metric.count for metric in loss_metrics(sums)}
    assert found == {
        "train/loss": 0.5,
        "train/clip_fraction": 0.75,
        "train/clip_fraction_low": 0.25,
        "train/clip_fraction_high": 0.5,
        "train/entropy_nats": 1.5,
        "train/advantage_mean": 0.5,
        "train/advantage_std": 1.0,
        "train/correction_changed": 0.25,
        "train/behaviour_ratio_mean": 1.5,
        "train/effective_sample_share": 0.75,
        "train/gold_logprob": -1.5,
        "train/gold_tokens": 2.0,
        "train/reference_k1": 0.5,
    }


def test_utilisation_is_three_passes_over_the_peak_of_all_ranks() -> None:
    def sequence(length: int) -> TrainSequence:
        ids, logprobs = np.zeros(length, np.int32), np.zeros(length - 1, np.float32)
        return TrainSequence(ids, 1, logprobs, [(0, length - 1)], 0.0, 1.0)

    share = MinibatchShare([[sequence(3), sequence(5)], [], [sequence(4)]])
    # Pairs of a query and a key: 6, 15 and 10.
    known = Utilisation(SequenceCost(per_token=10, per_pair=2), ranks=4, peak_flops=50.0)
    flops = known.flops(share)
    assert flops == 3 * (10 * 12 + 2 * 31)
    found = {m.name: m.value / m.count for m in known.metrics(flops=flops, tokens=16, seconds=2.0)}
    assert found == {
        "train/tokens_per_s_per_gpu": 16 / (4 * 2),
        "train/mfu": 546 / (4 * 2 * 50),
    }
    unknown = replace(known, peak_flops=None)
    [speed] = unknown.metrics(flops=flops, tokens=16, seconds=2.0)
    assert speed.name == "train/tokens_per_s_per_gpu"


def test_a_policy_loss_whose_sums_change_their_names_is_named() -> None:
    layout = SumsLayout(("loss", "seen"))
    assert layout.stack({"loss": torch.tensor(1.0), "seen": torch.tensor(2)}).tolist() == [1.0, 2.0]
    with pytest.raises(InputError, match=r"algorithm\.policy_loss reported no sums\['seen'\]"):
        layout.stack({"loss": torch.tensor(1.0), "other": torch.tensor(2)})
