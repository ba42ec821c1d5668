"""Runs inside every rank of an SGLang server: receives weights into its parameters.

SGLang calls `load` (its option `--custom-weight-loader`) between the begin and the end of a weight
update. An exception in `load` would kill the server, and SGLang drops its result, so
`EngineRank` reports in the exchange's store.
"""

import functools
from pathlib import Path
from typing import Any

import torch

from generation.sglang_orders import Keep, read_order
from generation.sglang_quantised import QuantisingParameters, check_runners, is_quantised
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.layout.engine_layout import expert_place, paired, trained_parameters
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Share

_obeyed: dict[str, int] = {}
"""Number of this rank's last order."""
_kept: dict[str, torch.Tensor] = {}
"""Host copies of the parameters that no weight sync sends, by name; empty before the order Keep."""


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Obey the engine's order; the list of tensors is empty."""
    found = read_order(after=_obeyed.get("number", 0))
    _obeyed["number"] = found.number
    match found.order:
        case Keep():
            _kept.update(unsent(model))
        case Receive():
            _rank(model).take(found.order)
            _write_back(model)
            derive(model)


def unsent(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters that no weight sync sends, a few kB, in the host's memory.

    SGLang 0.5.23 itself keeps buffers alone when it releases memory (scheduler_components,
    weight_updater.py: _export_static_state).
    """
    from sglang.srt.runtime_context import get_parallel, get_server_args

    ranks = get_parallel()
    place = expert_place(Share(ranks.tp_rank, ranks.tp_size), ranks.moe_ep_size)
    held = targets_of(model)
    sent = trained_parameters(read_shape(Path(get_server_args().model_path)), held, place)
    return {name: held[name].to("cpu", copy=True) for name in held.keys() - sent.keys()}


@torch.no_grad()
def _write_back(model: torch.nn.Module) -> None:
    """Give parameters what was kept: their memory may have been released since."""
    targets = targets_of(model) if _kept else {}
    for name, held in _kept.items():
        targets[name].copy_(held)


@torch.no_grad()
def derive(model: Any) -> None:
    """Recompute in place the tensors that SGLang derives from parameters.

    Latent attention multiplies by parts of kv_b_proj. SGLang 0.5.23 derives them at the end of a
    weight update only if no custom loader has run.
    """
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def targets_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that slices are copied into, by name of the parameter.

    Raises ValueError for a layer that stores weights otherwise than slices say.
    """
    check_runners(model)
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
