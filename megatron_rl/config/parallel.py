"""The section `[parallel]` of the configuration tree."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_rl.config.section import Section

OVERLAPPED_TENSOR_RANKS = (2, 4, 8)
"""With other counts TransformerEngine 2.12 silently starts no kernel (userbuffers.cu:
reducescatter2_userbuff_stridedoutput)."""


def stage_layers(layers: int, stages: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Layers of each pipeline stage. Raises ValueError for an impossible division.

    first, last: layers of the first and the last stage; 0: as many as the other stages.
    """
    if first and last and stages == 2:
        middle: tuple[int, ...] = ()
    else:
        others = stages - (first > 0) - (last > 0)
        middle = others * ((layers - first - last) // others,)
    found = (*([first] if first else []), *middle, *([last] if last else []))
    if sum(found) != layers or min(found) < 1:
        raise ValueError(f"{stages} pipeline stages cannot share {layers} layers as {found}")
    return found


class ParallelConfig(Section):
    """How the trainer ranks divide the model and the batch."""

    tensor: PositiveInt = 1
    """Tensor-parallel ranks; must divide attention heads, key-value heads and MLP units."""
    pipeline: PositiveInt = 1
    """Pipeline stages. Must divide the number of layers, not counting the layers of uneven first
    and last stages."""
    first_stage_layers: int = Field(default=0, ge=0)
    """Layers of the first pipeline stage, which also holds the embedding; 0: as many as the
    other stages. Megatron's num_layers_in_first_pipeline_stage. Not with virtual_stages."""
    last_stage_layers: int = Field(default=0, ge=0)
    """Layers of the last pipeline stage, which also computes the logits; 0: as many as the other
    stages. Megatron's num_layers_in_last_pipeline_stage. Not with virtual_stages."""
    virtual_stages: PositiveInt = 1
    """Model chunks of a pipeline stage (interleaved schedule); pipeline x virtual_stages must
    divide the layers."""
    context: PositiveInt = 1
    """Ranks that share the positions of each sequence."""
    context_exchange: Literal["auto", "p2p", "all_gather"] = "auto"
    """Exchange of keys and values among context ranks: TransformerEngine's ring (p2p), or all at
    once, as in the local layers; auto: what the layers support."""
    data: PositiveInt = 1
    """Data-parallel replicas."""
    expert: PositiveInt = 1
    """Ranks that share the experts of a layer; must divide the experts."""
    expert_tensor: PositiveInt = 1
    """Ranks that share each expert; expert x expert_tensor must divide tensor x context x data."""
    expert_exchange: Literal["all_to_all", "deepep"] = "all_to_all"
    """Transport of tokens to their experts and back. deepep: the kernels of the DeepEP package
    (CUDA), which need router scores in float32."""
    sequence: bool = False
    """Megatron sequence parallelism inside the tensor-parallel group; experts need it there. auto:
    true with tensor above 1."""
    distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel and context ranks. auto: true with data above
    1."""
    overlap_gradients: bool = False
    """Reduce gradients while the backward pass of the last microbatch runs. auto: true with data
    above 1."""
    overlap_parameters: bool = False
    """Gather updated parameters during the next forward pass. Needs distributed_optimizer and
    overlap_gradients."""
    overlap_tensor: bool = False
    """Tensor ranks exchange positions while they multiply (TransformerEngine's userbuffers, CUDA);
    needs sequence, and expert.train.pad_microbatches, as the buffers have one size."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_stages={self.virtual_stages} needs several stages, and "
                "parallel.pipeline=1: nearest possible: 1"
            )
        if self.has_uneven_stages and (self.virtual_stages > 1 or self.pipeline == 1):
            raise ValueError(
                f"expert.parallel.first_stage_layers={self.first_stage_layers} and "
                f"last_stage_layers={self.last_stage_layers} need parallel.pipeline above 1 and "
                f"virtual_stages=1, not {self.pipeline} and {self.virtual_stages}: set both to 0"
            )
        if self.overlap_parameters and not (self.distributed_optimizer and self.overlap_gradients):
            raise ValueError(
                "expert.parallel.overlap_parameters=true needs parallel.distributed_optimizer=true "
                "and parallel.overlap_gradients=true: set both, or it to false"
            )
        if self.expert_exchange == "deepep" and self.expert * self.expert_tensor == 1:
            raise ValueError(
                "expert.parallel.expert_exchange='deepep' needs ranks that share experts: set "
                "parallel.expert above 1, or 'all_to_all'"
            )
        if self.overlap_tensor:
            self._check_overlap_tensor()
        return self

    def _check_overlap_tensor(self) -> None:
        if not self.divides_positions:
            raise ValueError(
                f"expert.parallel.overlap_tensor=true with parallel.tensor={self.tensor} and "
                f"parallel.sequence={str(self.sequence).lower()} has nothing to overlap: set "
                "parallel.sequence=true and parallel.tensor above 1, or it to false"
            )
        if self.tensor not in OVERLAPPED_TENSOR_RANKS:
            nearest = min(OVERLAPPED_TENSOR_RANKS, key=lambda size: abs(size - self.tensor))
            raise ValueError(
                f"expert.parallel.overlap_tensor=true with parallel.tensor={self.tensor}: "
                "TransformerEngine's kernels know 2, 4 and 8 ranks; nearest possible: "
                f"{nearest}, or expert.parallel.overlap_tensor=false"
            )

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def has_uneven_stages(self) -> bool:
        """Whether the first or last stage has another number of layers."""
        return self.first_stage_layers + self.last_stage_layers > 0

    @property
    def divides_positions(self) -> bool:
        """Whether tensor ranks divide positions outside tensor-parallel products."""
        return self.sequence and self.tensor > 1

    @property
    def interleaved_chunks(self) -> int | None:
        """Megatron's number of chunks of a stage; None: the plain schedule."""
        return self.virtual_stages if self.virtual_stages > 1 else None
