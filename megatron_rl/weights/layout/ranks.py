"""Which trainer rank holds which part of the model. Runs on every trainer rank."""

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.weights.layout.tensor_shards import Share
from megatron_rl.weights.layout.trainer_layout import Place, place_of


def own_place() -> Place:
    """This rank's place; Megatron's groups must be made."""
    return Place(
        Share(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        Share(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        ),
        Share(
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        ),
        Share(
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        ),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def all_places() -> tuple[Place, ...]:
    """The place of every world rank, the same on all; replicas have equal places."""
    mine = own_place()
    ranks = range(dist.get_world_size())
    places = tuple(place_of(rank, len(ranks), mine) for rank in ranks)
    assert places[dist.get_rank()] == mine, f"{places[dist.get_rank()]} is not {mine}"
    return places
