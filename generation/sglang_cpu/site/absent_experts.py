"""Experts of other ranks, for SGLang's native mixture of experts.

Imported by SGLang's scheduler processes on the CPU. With expert ranks (--ep-size) SGLang 0.5.23
gives each rank the index -1 for experts that it does not hold, and its native code fails on it.
"""

from types import ModuleType
from typing import Any

import torch


def install(native: ModuleType) -> None:
    """Let `sglang.srt.layers.moe.fused_moe_native` skip experts that a rank does not hold."""
    forward = native.moe_forward_native

    def moe_forward_native(
        layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
    ) -> torch.Tensor:
        is_held = topk_output.topk_ids >= 0
        if bool(is_held.all()):
            return forward(layer, x, topk_output, moe_runner_config)
        output = torch.zeros_like(x)
        rows = is_held.nonzero()[:, 0]
        if len(rows):
            # Each held choice becomes a token of its own, with one expert.
            held = topk_output._replace(
                topk_weights=topk_output.topk_weights[is_held].unsqueeze(1),
                topk_ids=topk_output.topk_ids[is_held].unsqueeze(1),
            )
            output.index_add_(0, rows, forward(layer, x[rows], held, moe_runner_config))
        return output

    native.moe_forward_native = moe_forward_native
