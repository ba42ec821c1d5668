"""Runs inside every rank of an SGLang server: receives weights into its parameters.

SGLang calls `load` (its option `--custom-weight-loader`) between the begin and the end of a weight
update. An exception in `load` would kill the server, and SGLang drops its result, so
`EngineRank` reports in the exchange's store.
"""

import functools
from typing import Any

import torch

from generation.sglang_orders import Nothing, read_order
from generation.sglang_quantised import QuantisingParameters, is_quantised
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.layout.engine_layout import paired

_obeyed: dict[str, int] = {}
"""Number of this rank's last order."""


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Obey the engine's order; the list of tensors is empty."""
    found = read_order(after=_obeyed.get("number", 0))
    _obeyed["number"] = found.number
    if not isinstance(found.order, Nothing):
        _rank(model).take(found.order)
        derive(model)


@torch.no_grad()
def derive(model: Any) -> None:
    """Recompute in place the tensors that SGLang derives from parameters.

    Latent attention multiplies by parts of kv_b_proj. SGLang 0.5.23 derives them at the end of a
    weight update only if no custom loader has run.
    """
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def targets_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that slices are copied into, by name of the parameter."""
    if is_quantised(model):
        return QuantisingParameters(model)
    return paired(type(model).__name__, dict(model.named_parameters()))


@functools.cache
def _rank(model: torch.nn.Module) -> EngineRank:
    from sglang.srt.runtime_context import get_parallel

    return EngineRank(
        lambda: targets_of(model),
        get_parallel().tp_rank,
        model.get_parameter("model.norm.weight").dtype,
        may_pad_ffn=sglang_cpu.is_needed(),
    )
