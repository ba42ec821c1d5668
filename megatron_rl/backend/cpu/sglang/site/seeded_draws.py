"""Uniform numbers from the seed of a request and the position of a token, for SGLang on the CPU.

Imported by SGLang's scheduler processes. SGLang 0.5.23 takes seeds only with
--enable-deterministic-inference, which allows no attention of the CPU.
"""

import os
from types import ModuleType
from typing import Any

import numpy as np
import torch

from megatron_rl.protocol.engine_requests import DETERMINISTIC_VARIABLE

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def are_wanted() -> bool:
    """Whether tokens must not depend on the other requests (`expert.generator.deterministic`)."""
    return bool(os.environ.get(DETERMINISTIC_VARIABLE))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows] float64 in (0, 1]. seeds, positions: [rows] integers.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), over the seed and then over the
    position.
    """
    mixed = _mix(seeds.numpy().astype(np.uint64) + _GOLDEN)
    mixed = _mix(mixed + positions.numpy().astype(np.uint64) * _GOLDEN)
    # 53 bits are all that a float64 holds; without the 1 a uniform could be 0.
    return torch.from_numpy(((mixed >> np.uint64(11)) + np.uint64(1)) * 2.0**-53)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def install(module: ModuleType) -> None:
    """Give batches of `sglang.srt.sampling.sampling_batch_info` the seeds of their requests."""
    info_class = module.SamplingBatchInfo
    collect = info_class.from_schedule_batch

    def collect_with_seeds(batch: Any, vocab_size: int) -> Any:
        info = collect(batch, vocab_size)
        # SGLang's own requests, such as those of its health check, have none.
        seeds = [req.sampling_params.sampling_seed or 0 for req in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    if are_wanted():
        info_class.from_schedule_batch = staticmethod(collect_with_seeds)
