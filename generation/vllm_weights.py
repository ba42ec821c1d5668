"""The parameters of the model in the vLLM process, as receivers of a weight sync.

Runs in the vLLM process (`vllm_server.py`), in its one thread, only between two steps. The
exchange's receiver runs here: vLLM's pins have our torch release, so slices go from the trainer's
ranks into vLLM's parameters without another copy.

On the CPU vLLM packs each matrix for oneDNN and drops the matrix. Here the matrix stays, receives
weights, and is packed again after each weight sync: the weights take twice their memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.engine_layout import engine_slices
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Share

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def keep_weights() -> None:
    """Have vLLM keep the matrices that it packs. Call it before a model is loaded."""
    from vllm.model_executor.layers import utils

    pack: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)
        layer.pack_again = lambda: pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep
    # That packing would change the dtype of a bias.
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def model_of(core: "EngineCore") -> torch.nn.Module:
    """The model of the core's only rank."""
    return core.model_executor.driver_worker.worker.model_runner.model


class Weights:
    """The parameters, and the exchanges that write them."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        """folder: of the model. Raises ValueError if slices do not fit the parameters."""
        self._model = model
        self._parameters = dict(model.named_parameters())
        # Now, not at the first weight sync: another vLLM release may use other names.
        check_slices(engine_slices(read_shape(folder), Share(0, 1)), self._parameters)
        dtype = model.get_parameter("model.norm.weight").dtype
        self.rank = EngineRank(lambda: self._parameters, 0, dtype, may_pad_ffn=False)
        """Takes part in the exchanges."""

    @torch.no_grad()
    def repack(self) -> None:
        """Pack the current values of the parameters."""
        for module in self._model.modules():
            pack_again: Callable[[], Any] | None = getattr(module, "pack_again", None)
            if pack_again is not None:
                pack_again()
