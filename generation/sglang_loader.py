"""Runs inside every rank of an SGLang server: takes weights from trainer ranks into its parameters.

SGLang calls `load` (its option `--custom-weight-loader`) between the begin and the end of a weight
update. An exception that left `load` would kill the server, and its result goes nowhere, so
`Receiver` reports in the exchange's store.
"""

import functools
from typing import Any

import torch

from generation import sglang_cpu
from generation.sglang_orders import read_order
from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.receiver import Receiver

_obeyed: dict[str, int] = {}
"""Number of this rank's last order."""


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Obey the engine's order; the tensors are none."""
    found = read_order(after=_obeyed.get("number", 0))
    _obeyed["number"] = found.number
    if isinstance(found.order, Receive):
        _receiver(model).take(found.order)


@functools.cache
def _receiver(model: torch.nn.Module) -> Receiver:
    from sglang.srt.runtime_context import get_parallel

    return Receiver(
        lambda: dict(model.named_parameters()),
        get_parallel().tp_rank,
        model.get_parameter("model.norm.weight").dtype,
        may_pad_ffn=sglang_cpu.is_needed(),
    )
