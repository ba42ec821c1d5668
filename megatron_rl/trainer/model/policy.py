"""The policy being trained: this rank's model chunks, their sizes and limits.

Runs in trainer ranks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.backend import fp8, tensor_overlap
from megatron_rl.backend.cpu.folding import SOURCE as FOLDING
from megatron_rl.backend.cpu.loops import library
from megatron_rl.backend.device import Backend, select_backend
from megatron_rl.config.tree import Config, ParallelConfig
from megatron_rl.protocol.process import failures_noted, raise_file_limit
from megatron_rl.trainer.model.build import build_model
from megatron_rl.weights.folders.export import save_hf
from megatron_rl.weights.folders.hf_folder import open_origin
from megatron_rl.weights.folders.load import load_megatron, load_weights
from megatron_rl.weights.layout.local_names import named_parameters
from megatron_rl.weights.layout.ranks import own_place
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trainer_slices

FILES_OF_A_RANK = 512
"""Files and sockets of a rank, without the sockets to every other rank and its store."""


@dataclass(frozen=True)
class Policy:
    """This rank's part of the model, with weights loaded."""

    backend: Backend
    shape: ModelShape
    chunks: list[DistributedDataParallel]
    parallel: ParallelConfig
    cfg: Config
    """The configuration of the model."""

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters, gradients and microbatches."""
        return self.backend.device

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(math.prod(size) for size in hf_shapes(self.shape).values())

    @property
    def weights(self) -> tuple[dict[str, Tensor], Callable[[], list[Slice]]]:
        """This rank's parameters by local name, and what gives their slices of HF tensors."""
        place = own_place(self.chunks[0].config)
        return named_parameters(self.chunks), lambda: trainer_slices(self.shape, place)

    @property
    def position_multiple(self) -> int:
        """A microbatch's positions must be a multiple of this."""
        is_divided = self.has_sequence_parallelism
        ranks = self.parallel.context * (self.parallel.tensor if is_divided else 1)
        each = fp8.position_multiple(self.cfg.model, is_gathered=is_divided)
        return math.lcm(ranks * each, self.sequence_multiple)

    @property
    def sequence_multiple(self) -> int:
        """Each sequence's positions must be a multiple of this: context ranks hold two chunks."""
        return 2 * self.parallel.context if self.parallel.context > 1 else 1

    @property
    def fixed_positions(self) -> int:
        """Positions of every microbatch (`expert.train.pad_microbatches`); 0: they vary."""
        train = self.cfg.train
        if not train.pad_microbatches:
            return 0
        return train.microbatch_tokens + -train.microbatch_tokens % self.position_multiple

    @property
    def has_sequence_parallelism(self) -> bool:
        """Whether tensor ranks divide the positions among them between their layers."""
        return self.parallel.divides_positions

    @property
    def shares_prompts(self) -> bool:
        """Whether a microbatch holds positions that its sequences share only once.

        Only the CPU's attention can unfold them. Not with context ranks or expert choices, which
        need whole sequences; nor where tensor ranks divide positions, unless attention is plain.
        """
        attention_is_plain = (
            not self.shape.has_qk_norm
            and not self.shape.scales_queries
            and self.shape.kv_heads >= self.parallel.tensor
        )
        return (
            self.device.type == "cpu"
            and library(FOLDING) is not None
            and self.parallel.context == 1
            and not self.fixed_positions
            and not self.shape.experts
            and (attention_is_plain or not self.has_sequence_parallelism)
        )

    @property
    def microbatch_multiple(self) -> int:
        """The count of microbatches of a step must be a multiple of this."""
        return self.parallel.pipeline if self.parallel.virtual_stages > 1 else 1

    @property
    def position_share(self) -> Share:
        """This rank's part of a microbatch's positions between its layers."""
        if not self.has_sequence_parallelism:
            return Share()
        return Share(parallel_state.get_tensor_model_parallel_rank(), self.parallel.tensor)

    def export(self, cfg: Config, name: str) -> None:
        """Write the model to RUN/hf/NAME; every rank must call it.

        Replaces an older export, of a run that was killed after it or is made longer.
        """
        folder = cfg.run.dir / "hf" / name
        save_hf(
            folder,
            self.chunks,
            self.shape,
            source=cfg.model.path,
            replaces=True,
            run=cfg,
            patience_s=cfg.checkpoint.write_timeout_s,
        )


@contextmanager
def open_policy(cfg: Config) -> Iterator[Policy]:
    """Join the trainer ranks, build the model and load its weights straight into shards.

    The weights come from `cfg.model.megatron_path`, or else from `cfg.model.path`. Leaves the
    process groups at the end; after an error it aborts them. Raises InputError; for impossible
    sizes before anything is built.
    """
    shape = read_shape(cfg.model.path)
    check_parallel(shape, cfg.parallel)
    attention = shape.attention(cfg.train)
    backend = select_backend(cfg.model, attention)
    if attention.is_deterministic:
        backend.make_deterministic()
    backend.check_offload(cfg.optimizer)
    backend.check_offload(cfg.sft.optimizer)
    tensor_overlap.check(
        cfg,
        shape.hidden,
        has_latent_attention=shape.kv_rank > 0,
        has_engine=backend.layers == "transformer_engine",
    )
    raise_file_limit(FILES_OF_A_RANK + 2 * cfg.parallel.world_size, "a rank of this trainer")
    backend.init_distributed(
        cfg.parallel, seed=cfg.run.seed, timeout_s=cfg.train.collective_timeout_s
    )
    try:
        chunks = build_model(backend, cfg, shape)
        if cfg.model.megatron_path is None:
            load_weights(chunks, shape, cfg.model.path)
        else:
            load_megatron(chunks, shape, cfg.model.megatron_path)
            with ExitStack() as stack:
                # An export takes a wrapper's other tensors from there: better refused now.
                open_origin(cfg.model.path, shape, stack)
        policy = Policy(backend, shape, chunks, cfg.parallel, cfg)
        with tensor_overlap.buffers(cfg, shape.hidden, policy.fixed_positions), failures_noted():
            yield policy
    except BaseException:
        backend.shutdown(failed=True)
        raise
    backend.shutdown()
