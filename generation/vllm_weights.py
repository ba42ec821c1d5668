"""The parameters of the model in the vLLM process, and how a weight sync gets into them.

Runs in the vLLM process (`vllm_server.py`), in its one thread, only while no step is taken. The
exchange's receiver runs right here: vLLM's pins hold the same torch as ours, so slices go from the
trainer's ranks into vLLM's parameters without another copy.

On the CPU vLLM packs each matrix for oneDNN and drops the matrix. Here it stays, as the place where
weights arrive, and is packed again when they are whole: the weights take twice their memory.
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

from megatron_rl.protocol.types import Bucket, JoinGroup, PassOn, Receive
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
"""A bucket that takes longer has failed; the generator gives up earlier."""


class OrderFailed(RuntimeError):
    """An order could not be obeyed; the text says why."""


def keep_weights() -> None:
    """Have vLLM keep the matrices that it packs. Before a model is loaded."""
    from vllm.model_executor.layers import utils

    pack: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)
        layer.pack_again = lambda: pack(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = pack_and_keep
    # That packing would turn a bias into another dtype than arrives.
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def model_of(core: "EngineCore") -> torch.nn.Module:
    """The model of the core's only rank."""
    return core.model_executor.driver_worker.worker.model_runner.model


class Weights:
    """Parameters, and the exchanges that reach them."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        """folder: of the model. Raises ValueError where slices would not fit the parameters."""
        self._model = model
        self._parameters = dict(model.named_parameters())
        # Now, not at the first weight sync: another release of vLLM may call them otherwise.
        check_slices(engine_slices(read_shape(folder), Share(0, 1)), self._parameters)
        dtype = model.get_parameter("model.norm.weight").dtype
        self._rank = EngineRank(lambda: self._parameters, 0, dtype, may_pad_ffn=False)
        self._group: dist.ProcessGroup | None = None

    def exchange(self, order: Receive | PassOn) -> None:
        """Take slices or pass them on. What went wrong stands in the exchange's store."""
        with torch.no_grad():
            self._rank.obey(order)

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
        """Load tensors under their Hugging Face names; the parameters that they reached."""
        return set(self._model.load_weights(iter(named)))

    def leave_group(self) -> None:
        """Leave the syncer's groups."""
        self._rank.leave()
        if self._group is not None:
            close_group(self._group)
            self._group = None

    @torch.no_grad()
    def repack(self) -> None:
        """Compute with what the parameters hold now."""
        for module in self._model.modules():
            pack_again: Callable[[], Any] | None = getattr(module, "pack_again", None)
            if pack_again is not None:
                pack_again()


@contextmanager
def _order_errors(doing: str) -> "Iterator[None]":
    """Give what a peer or a folder may cause as OrderFailed."""
    try:
        yield
    # vLLM's loaders of weights assert the shapes.
    except (OSError, KeyError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise OrderFailed(f"{doing}: {type(error).__name__}: {error}") from error
