"""What the trainer writes down of a step."""

import json
from pathlib import Path

import torch.distributed as dist

from megatron_rl.protocol.metrics import Metric
from megatron_rl.trainer.metrics import StepMetrics
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
