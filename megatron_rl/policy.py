"""The policy being trained, as the trainer sees it: model chunks and what to know of them.

Runs in trainer ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.backend import Backend, select_backend
from megatron_rl.model import build_model, count_parameters, unwrap
from megatron_rl.protocol.config import Config
from megatron_rl.weights.layouts import Share
from megatron_rl.weights.load import load_weights
from megatron_rl.weights.shape import ModelShape, check_parallel, read_shape


@dataclass(frozen=True)
class Policy:
    """This rank's part of the model, with weights loaded."""

    backend: Backend
    shape: ModelShape
    chunks: list[DistributedDataParallel]
    has_sequence_parallelism: bool
    tensor_ranks: int

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.backend.device

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return count_parameters(self.shape)

    @property
    def position_multiple(self) -> int:
        """A microbatch's positions must be a multiple of this."""
        return self.tensor_ranks if self.has_sequence_parallelism else 1

    @property
    def position_share(self) -> Share:
        """This rank's part of a microbatch's positions between its layers."""
        if not self.has_sequence_parallelism:
            return Share()
        return Share(parallel_state.get_tensor_model_parallel_rank(), self.tensor_ranks)

    @property
    def output_layer(self) -> torch.nn.Module | None:
        """The vocabulary projection, on the last pipeline stage only."""
        return getattr(unwrap(self.chunks[-1]), "output_layer", None)


@contextmanager
def open_policy(cfg: Config) -> Iterator[Policy]:
    """Join the trainer ranks, build the model and load `cfg.model.path` straight into shards.

    Leaves the process groups at the end. Raises InputError before anything is built.
    """
    shape = read_shape(cfg.model.path)
    check_parallel(shape, cfg.parallel)
    backend = select_backend(cfg.model)
    backend.init_distributed(
        cfg.parallel, seed=cfg.run.seed, timeout_s=cfg.train.collective_timeout_s
    )
    try:
        chunks = build_model(backend, cfg, shape)
        load_weights(chunks, shape, cfg.model.path)
        has_sequence_parallelism = cfg.parallel.sequence and cfg.parallel.tensor > 1
        yield Policy(backend, shape, chunks, has_sequence_parallelism, cfg.parallel.tensor)
    finally:
        backend.shutdown()
