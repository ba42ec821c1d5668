"""Place of each trainer rank in the model. Runs on every trainer rank."""

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.weights.layout.place import Place, place_of
from megatron_rl.weights.layout.slices import Share


def own_place(config: TransformerConfig | None = None) -> Place:
    """This rank's place; Megatron's groups must be made.

    config: Megatron's, of the model; by default all stages have equally many layers.
    """
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
        _ends(config),
    )


def _ends(config: TransformerConfig | None) -> tuple[int, int]:
    if config is None:
        return (0, 0)
    first = config.num_layers_in_first_pipeline_stage
    return (first or 0, config.num_layers_in_last_pipeline_stage or 0)


def all_places(config: TransformerConfig | None = None) -> tuple[Place, ...]:
    """The place of every world rank, the same on all; replicas have equal places."""
    mine = own_place(config)
    ranks = range(dist.get_world_size())
    places = tuple(place_of(rank, len(ranks), mine) for rank in ranks)
    assert places[dist.get_rank()] == mine, f"{places[dist.get_rank()]} is not {mine}"
    return places
