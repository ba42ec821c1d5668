"""How trainer ranks divide the model, as plain numbers. Pure."""

from dataclasses import dataclass

from megatron_rl.config.parallel import ParallelConfig, stage_layers


@dataclass(frozen=True)
class Division:
    """Counts of ranks along each dimension, and what is sharded."""

    tensor: int = 1
    pipeline: int = 1
    ends: tuple[int, int] = (0, 0)
    """Layers of the first and the last stage; 0: as many as the stages between them."""
    virtual_stages: int = 1
    """Chunks of layers on each pipeline rank."""
    data: int = 1
    context: int = 1
    """Ranks that share the tokens of a sequence."""
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that share one expert."""
    is_sequence_parallel: bool = False
    is_optimizer_sharded: bool = False
    """Megatron's distributed optimizer."""

    def stage_layers(self, layers: int, stage: int) -> int:
        """Layers of a pipeline stage, of a model with `layers`."""
        return stage_layers(layers, self.pipeline, *self.ends)[stage]

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def dense_shards(self) -> int:
        """Ranks over which the optimizer state of parameters outside experts is divided."""
        return self.data * self.context if self.is_optimizer_sharded else 1

    @property
    def expert_shards(self) -> int:
        """The same for parameters of experts: ranks of a stage that hold the same ones."""
        if not self.is_optimizer_sharded:
            return 1
        return self.tensor * self.data * self.context // (self.expert * self.expert_tensor)

    @property
    def sequence_shards(self) -> int:
        """Tensor ranks over which tokens are divided outside attention and MLP."""
        return self.tensor if self.is_sequence_parallel else 1


def division_of(parallel: ParallelConfig) -> Division:
    """The division of a configuration."""
    return Division(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        ends=(parallel.first_stage_layers, parallel.last_stage_layers),
        virtual_stages=parallel.virtual_stages,
        data=parallel.data,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        is_sequence_parallel=parallel.divides_positions,
        is_optimizer_sharded=parallel.distributed_optimizer,
    )
