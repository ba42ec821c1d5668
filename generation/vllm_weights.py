"""The parameters of the model in the vLLM process, as receivers of a weight sync.

Runs in the vLLM process (`vllm_server.py`), in its one thread, only between two steps. The
exchange's receiver runs here: vLLM's pins have our torch release, so slices go from the trainer's
ranks into vLLM's parameters without another copy.

On the CPU vLLM packs each matrix for oneDNN and drops the matrix. Here the matrix stays, receives
weights, and is packed again after each weight sync: the weights take twice their memory.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_rl.protocol.types import Bucket, JoinGroup, Receive
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.group import bucket_bytes, close_group, open_group, split_bucket
from megatron_rl.weights.layout.engine_layout import check_slices, engine_slices
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.engine.core import EngineCore

log = logging.getLogger(__name__)

BROADCAST_S = 600.0
"""Seconds after which a bucket has failed; the generator gives up earlier."""


class OrderFailed(RuntimeError):
    """An order failed; the text says why."""


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
        self._rank = EngineRank(lambda: self._parameters, 0, dtype, may_pad_ffn=False)
        self._group: dist.ProcessGroup | None = None

    def exchange(self, order: Receive) -> None:
        """Receive slices, and hand them on; errors are reported in the store of the trainer."""
        with torch.no_grad():
            self._rank.take(order)

    def load(self, folder: Path) -> None:
        """Load a folder's safetensors. Raises OrderFailed."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise OrderFailed(f"{folder} has no safetensors")
        with _order_errors(f"cannot load {folder}"):
            loaded: set[str] = set()
            for file in files:
                loaded |= self._take(load_file(file).items())
        missing = sorted(self._parameters.keys() - loaded)
        if missing:
            raise OrderFailed(f"{folder} lacks {len(missing)} parameters, such as {missing[:3]}")

    def join_group(self, message: JoinGroup) -> None:
        """Join the group of a broadcast. Raises OrderFailed."""
        with _order_errors("cannot join the weight group"):
            self._group = open_group(message, message.rank_offset)

    def receive_bucket(self, bucket: Bucket) -> None:
        """Take part in the broadcast of a bucket and load it. Raises OrderFailed."""
        if self._group is None:
            raise OrderFailed("received a bucket before JoinGroup: join the group first")
        flat = torch.empty(bucket_bytes(bucket.dtypes, bucket.shapes), dtype=torch.uint8)
        with _order_errors("the bucket could not be received"):
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
            work.wait(timedelta(seconds=BROADCAST_S))
            self._take(split_bucket(flat, bucket.names, bucket.dtypes, bucket.shapes))

    @torch.no_grad()
    def _take(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors by their Hugging Face names; return the parameters written."""
        return set(self._model.load_weights(iter(named)))

    def leave_group(self) -> None:
        """Leave the syncer's groups."""
        self._rank.leave()
        if self._group is not None:
            close_group(self._group)
            self._group = None

    @torch.no_grad()
    def repack(self) -> None:
        """Pack the current values of the parameters."""
        for module in self._model.modules():
            pack_again: Callable[[], Any] | None = getattr(module, "pack_again", None)
            if pack_again is not None:
                pack_again()


@contextmanager
def _order_errors(doing: str) -> "Iterator[None]":
    """Turn errors that a peer or a folder may cause into OrderFailed."""
    try:
        yield
    # vLLM's weight loaders assert shapes.
    except (OSError, KeyError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise OrderFailed(f"{doing}: {type(error).__name__}: {error}") from error
